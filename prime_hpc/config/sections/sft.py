"""SFT's section: the data and its batch shape, held-out evaluation. Optimizer and ranks are the trainer's."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from prime_hpc.config.sections.base import Section, from_here, in_home

TOKEN_COLUMNS = ("input_ids", "loss_mask", "labels", "attention_mask")
"""The parts of a row that is tokenised already."""
SIDES = ("chosen", "rejected")
"""The two replies of a row of preferences, in the order of its sequences."""
COLUMNS = ("messages", "prompt", "completion", "system", "tools", "images", "text", *SIDES, *TOKEN_COLUMNS)
"""The parts that a row may hold, by the product's names."""
MARGIN = "margin"
"""Of a row of preferences for a reward model: by how much its chosen side should score higher."""
IMAGE_PARTS = ("image", "image_url")
"""Values of `type` of a message's content parts that are images."""


class SFTSourceConfig(Section):
    """The source of rows."""

    type: Literal["auto", "jsonl", "parquet", "hub", "fake"] = "auto"
    """JSON lines, Parquet, a data set of the hub (or saved by `datasets`), random tokens; `auto` goes by the name."""
    path: str | list[str] | None = None
    """Files, patterns (`data/*.jsonl.gz`) or directories: rows with `prompt` and `completion`, with `messages` (and
    `tools`), with nothing but `text`, all of which is trained, or tokenised: with `input_ids`, and `loss_mask` or
    `labels`; with `sft.preference`: with `chosen` and `rejected`. Files may be compressed (.gz, .zst). What is named
    twice is trained on twice an epoch."""
    name: str | None = None
    """Data set of the hub, such as `owner/name`; needs the extra `prime-hpc[data]`."""
    subset: str | None = None
    """`name`: which of its configurations."""
    split: str = "train"
    """`name`, or a directory that `datasets` saved: which of its splits."""
    columns: dict[str, str] = {}
    """The data's own names of the columns `messages`, `prompt`, `completion`, `system`, `tools`, `images`, `text`,
    `chosen`, `rejected`, `margin`, `input_ids`, `loss_mask`, `labels`, `attention_mask`: `{prompt: question}`. A prompt
    in `instruction` goes on in `input`, after `history` (Alpaca)."""
    _holds_pairs: bool = PrivateAttr(False)
    _scores: bool = PrivateAttr(False)

    @field_validator("path", mode="before")
    @classmethod
    def _from_here(cls, value: Any) -> Any:
        """Paths are meant from where the command was typed; roles run elsewhere."""
        if isinstance(value, list | tuple):
            return [cls._from_here(item) for item in value]
        return str(in_home(value).absolute()) if isinstance(value, str | os.PathLike) else value

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(value) - {*COLUMNS, MARGIN})
        if unknown:
            raise ValueError(
                f"columns maps {', '.join((*COLUMNS, MARGIN))} to the data's own names; it has {', '.join(unknown)}"
            )
        return value

    @model_validator(mode="after")
    def _one_source(self) -> "SFTSourceConfig":
        if self.path is not None and self.name is not None:
            raise ValueError("path and name are two sources: state one")
        return self

    @property
    def key(self) -> str:
        """The section that states it."""
        return "sft.data"

    @property
    def holds_pairs(self) -> bool:
        """Tell whether rows are preferences (`sft.preference`)."""
        return self._holds_pairs

    @property
    def scores(self) -> bool:
        """Tell whether a reward model reads the pairs: each side at its last token."""
        return self._scores

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [] if self.path is None else [self.path] if isinstance(self.path, str) else self.path

    @property
    def label(self) -> str:
        """The source for people."""
        return "fake" if self.type == "fake" else self.name or ", ".join(self.paths) or "none"


class SFTDataConfig(SFTSourceConfig):
    """Prompt-completion or messages data for supervised fine-tuning."""

    batch_size: int = Field(64, ge=1)
    """Samples a step, over all ranks; with `sft.preference`: pairs."""
    num_epochs: float | None = Field(None, gt=0)
    """Passes over the data, instead of `max_steps`: the trainer counts their steps at its start, for which it tokenises
    every row once (what it finds is kept in `cache_dir`). The last step takes what is left."""
    probabilities: list[float] | None = None
    """Share of the rows that come from each entry of `path`, in their order: `[0.7, 0.3]`; default: all rows alike."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """`probabilities`: an epoch ends when the first source, or every source, has been used up once; the others are used
    in part, or begun again."""
    batch_tokens: int | None = Field(None, ge=2)
    """Tokens a step at most, over all ranks, instead of `batch_size`: whole samples as long as they fit."""
    pack: bool = True
    """Pack samples to `micro_batch_tokens`; off: `micro_batch_size` rows of one sample each, with the same loss."""
    pad_multiple: int | None = Field(None, ge=1)
    """`pack` off: fill each row with masked padding to a multiple of so many tokens (`seq_len`: one fixed shape)."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples of one micro-batch of fake data, or where `pack` is off (packing goes by `micro_batch_tokens`)."""
    length: Literal["fixed", "variable"] = "fixed"
    """Lengths of fake samples."""
    seq_len: int | None = Field(None, ge=2)
    """Longest sample in tokens, of a pair each side; default: the tree's `seq_len`."""
    shuffle: bool = True
    """Shuffle every epoch, by seed."""
    loss_roles: tuple[str, ...] = ("assistant",)
    """Messages of these roles are trained on; a message's own `train` (or `loss`, `weight`; 0 or 1) goes before it."""
    loss_turns: Literal["all", "last"] = "all"
    """Of the messages of `loss_roles`: all, or the conversation's last one only."""
    split_turns: bool = False
    """Make every trained message a sample of its own, with the history as the template shows it at that turn: for
    templates that rewrite the past (Qwen3's drops earlier think sections)."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's; `none`: prompt and completion are plain text; else a Jinja file, which the published
    weights hold in the place of the model's."""
    overlong: Literal["error", "drop", "truncate", "split"] = "drop"
    """Treatment of a sample longer than `seq_len`; counted in the metrics. `split`, of rows of `text` and
    of tokens all of which are trained: each piece is a sample."""
    bad_rows: Literal["error", "skip"] = "error"
    """Treatment of a row that cannot be read or that the template refuses; skipped ones are counted."""
    num_workers: int | None = Field(None, ge=0)
    """Processes of each rank that read and tokenise ahead; 0: a thread. Default: 2 beside a GPU, else 0."""
    prefetch: int = Field(2, ge=1)
    """Batches made ahead."""
    cache_dir: Path | None = None
    """Folder of line indices and unpacked files; default `<output_dir>/.sft-cache`."""
    on_change: Literal["error", "restart"] = "error"
    """Treatment of a resume with other data, another order or another chat template than the checkpoint's: `restart`
    begins an epoch."""

    _cache_from_here = field_validator("cache_dir")(from_here)

    @field_validator("chat_template")
    @classmethod
    def _template_from_here(cls, value: str) -> str:
        return value if value in ("auto", "none") else str(from_here(Path(value)))

    @property
    def template_file(self) -> Path | None:
        """The Jinja file, where there is one."""
        return None if self.chat_template in ("auto", "none") else Path(self.chat_template)

    def read_template(self) -> str | None:
        """Return the text of that file; None: there is none. Raises ValueError where it cannot be read."""
        file = self.template_file
        try:
            return file.read_text(encoding="utf-8") if file is not None else None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"sft.data.chat_template = {file}: {error}") from error

    @model_validator(mode="after")
    def _padding_needs_rows(self) -> "SFTDataConfig":
        if self.pad_multiple is not None and self.pack:
            raise ValueError("pad_multiple fills rows of one sample each: set pack = false, or leave it out")
        return self

    @model_validator(mode="after")
    def _mixture_has_sources(self) -> "SFTDataConfig":
        shares = self.probabilities
        if shares is None:
            return self
        if len(shares) < 2 or len(shares) != len(self.paths):
            raise ValueError(
                f"probabilities states {len(shares)} shares, path {len(self.paths)} entries: one share for each of two "
                "or more entries (a data set of the hub: save it with `datasets`, and name the folder)"
            )
        if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"probabilities must be above 0 and add up to 1, got {shares}: leave an unused source out")
        return self

    @model_validator(mode="after")
    def _epochs_end(self) -> "SFTDataConfig":
        if self.num_epochs is not None and self.type == "fake":
            raise ValueError("num_epochs counts passes over rows, and random tokens have no end: set max_steps")
        return self


class SFTHeldOutConfig(SFTSourceConfig):
    """Held-out rows; without a source of its own, another split of the training data set."""

    split: str = "validation"
    """`name`, or a directory that `datasets` saved: which of its splits."""

    @model_validator(mode="after")
    def _real(self) -> "SFTHeldOutConfig":
        if self.type == "fake":
            raise ValueError("random tokens have no held-out loss: name rows with path or name")
        return self


class SFTEvalSetConfig(SFTHeldOutConfig):
    """One of several sets of held-out rows."""

    id: str = Field(min_length=1)
    """Its name in the metrics: `eval/ID/loss`."""

    @property
    def key(self) -> str:
        """The section that states it."""
        return "sft.eval.sets.N"


class SFTEvalConfig(SFTHeldOutConfig):
    """Loss on held-out rows; without a source of its own, another split of the training data set."""

    sets: list[SFTEvalSetConfig] = []
    """Several sets of held-out rows, each with a loss of its own, instead of one."""
    interval: int = Field(50, ge=1)
    """Every so many steps (and before the first and after the last)."""
    num_rows: int | None = Field(None, ge=1)
    """First rows only, of each set; default: all."""

    @property
    def key(self) -> str:
        """The section that states it."""
        return "sft.eval"

    @model_validator(mode="after")
    def _sets_alone(self) -> "SFTEvalConfig":
        ids = [one.id for one in self.sets]
        if twice := next((one for one in ids if ids.count(one) > 1), None):
            raise ValueError(f"two of eval.sets have the id {twice}: their losses would have one name")
        fields = SFTSourceConfig.model_fields if self.sets else {}
        if stated := [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]:
            raise ValueError(f"eval.{stated[0]} is of one set, and eval.sets states several: make it one of them")
        return self


class PreferenceConfig(Section):
    """A loss on pairs of replies to one prompt, of which one was preferred. With r the sum of log pi - log pi_ref over
    a reply's tokens and d = r(chosen) - r(rejected), pi_ref being the weights that training begins with."""

    type: Literal["dpo", "ipo", "hinge", "bradley_terry"] = "dpo"
    """`dpo`: - log sigmoid(beta d) (arXiv 2305.18290); `ipo`: (d - 1 / (2 beta))^2 (arXiv 2310.12036); `hinge`:
    max(0, 1 - beta d) (arXiv 2305.10425). `bradley_terry` trains a reward model: r is what a scalar head, in the place
    of the language model's, gives the last token, and the loss is - log sigmoid(d) (arXiv 2203.02155)."""
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """The weight of d: the smaller, the farther the policy may go from the reference."""
    reference: bool = True
    """Off: r is the sum of log pi alone, and no reference is computed."""
    length_normalized: bool = False
    """r is the mean over a reply's tokens instead of the sum: Tulu 3's `dpo_norm`; without `reference` SimPO."""
    margin: float = Field(0.0, ge=0, allow_inf_nan=False)
    """`dpo`, `bradley_terry`: taken from beta d, what a pair must differ by (SimPO's gamma, arXiv 2405.14734); a row of
    `bradley_terry` may have a `margin` of its own besides (arXiv 2307.09288)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """`dpo`, `bradley_terry`: the share of pairs that are taken to be labelled the wrong way round (cDPO)."""
    nll_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen reply's mean negative log-likelihood beside the loss (RPO, arXiv 2404.19733)."""
    centering_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """`bradley_terry`: weight of (r(chosen) + r(rejected))^2, which keeps rewards about 0 (arXiv 2312.09244)."""

    @property
    def scores(self) -> bool:
        """Tell whether r is a reward model's score."""
        return self.type == "bradley_terry"

    @property
    def compares(self) -> bool:
        """Tell whether r is compared with the starting weights'."""
        return self.reference and not self.scores

    @property
    def scale(self) -> float:
        """The weight of d."""
        return 1.0 if self.scores else self.beta

    @model_validator(mode="after")
    def _scores_are_no_logprobs(self) -> "PreferenceConfig":
        of_logprobs = ("beta", "reference", "length_normalized", "nll_weight") if self.scores else ()
        for name in of_logprobs:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of log-probabilities, and bradley_terry compares scores: leave it out")
        return self


class SFTConfig(Section):
    """Supervised fine-tuning."""

    data: SFTDataConfig = SFTDataConfig()
    """The data."""
    preference: PreferenceConfig | None = None
    """Train on preferences (DPO and its kin): rows hold `chosen` and `rejected`. Off when absent."""
    eval: SFTEvalConfig | None = None
    """Held-out loss during training; off when absent."""
    save_interval: int | None = Field(None, ge=1)
    """Publish weights every so many steps besides the last."""

    @property
    def num_sides(self) -> int:
        """Sequences of one sample: of a pair two, which share a micro-batch."""
        return 1 if self.preference is None else len(SIDES)

    @property
    def eval_sets(self) -> dict[str, SFTHeldOutConfig]:
        """Sets of held-out rows, by their keys."""
        if self.eval is None:
            return {}
        return {f"sft.eval.sets.{n}": one for n, one in enumerate(self.eval.sets)} or {"sft.eval": self.eval}

    @property
    def eval_sources(self) -> dict[str, SFTSourceConfig]:
        """The sources of held-out rows, by the keys that state them."""
        return {
            key: one if one.paths or one.name is not None else self.data.model_copy(update={"split": one.split})
            for key, one in self.eval_sets.items()
        }

    @property
    def sources(self) -> dict[str, SFTSourceConfig]:
        """The sources of all rows, by the keys that state them."""
        return {"sft.data": self.data, **self.eval_sources}

    @model_validator(mode="after")
    def _rows_are_of_one_kind(self) -> "SFTConfig":
        for source in (self.data, *self.eval_sets.values()):
            source._holds_pairs = self.preference is not None
            source._scores = self.preference is not None and self.preference.scores
        if self.preference is None:
            return self
        if self.data.split_turns:
            raise ValueError("data.split_turns makes several samples of a reply, and a pair has two: leave it out")
        if self.data.overlong == "split":
            raise ValueError("data.overlong = split is for text of which all is trained; of pairs: drop, or truncate")
        return self

    @model_validator(mode="after")
    def _held_out(self) -> "SFTConfig":
        for key, source in self.eval_sources.items():
            section = key.removeprefix("sft.")
            if self.eval_sets[key].paths:
                continue
            if source.name is None:
                raise ValueError(f"{section} names no held-out rows: set {section}.path (or {section}.name)")
            if (source.name, source.subset, source.split) == (self.data.name, self.data.subset, self.data.split):
                raise ValueError(
                    f"{section}.split = {source.split} is what is trained on: name another split, or {section}.path"
                )
        return self
