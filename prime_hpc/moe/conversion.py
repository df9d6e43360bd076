"""The tensors of a model that those of a checkpoint make: transformers' own conversions, on whatever stands for them.

transformers loads many models from other tensors than its modules hold: mixtures keep their experts apart, some models
fuse or split projections, others rename modules. It states how as `WeightConverter`s and `WeightRenaming`s.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any


def convert(hf: Any, model: Iterable[str], stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Make a model's tensors of stored ones. The loop is that of `convert_and_load_state_dict_in_model`.

    Args:
        stored: by the checkpoint's names, tensors or what takes part in torch's functions as they do.

    Returns:
        the model's tensors by its names, those that none is stored for left out; and the stored ones that make none.

    Raises:
        ValueError: they cannot be converted; says which.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(hf)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, own = hf.base_model_prefix, dict.fromkeys(model, True)
    chosen: dict[str, Any] = {}
    made: dict[str, Any] = {}
    unknown = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=own)
        if target not in own:
            unknown.append(name)
        elif pattern is None:
            made[target] = stored[name]
        else:
            converter = chosen.setdefault(target, deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, stored[name])
    for target, converter in chosen.items():
        try:
            made |= {k: v[0] if isinstance(v, list) else v for k, v in converter.convert(target, hf, hf.config).items()}
        except (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError) as error:
            kinds = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise ValueError(
                f"the stored tensors of {target} cannot be read as transformers reads them ({kinds}: {error})"
            ) from error
    return {name: tensor for name, tensor in made.items() if name in own}, unknown
