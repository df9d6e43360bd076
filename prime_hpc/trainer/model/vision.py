"""The forward pass of a model that sees images, over rows whose images' places are known.

transformers looks for images where their token's id stands. A policy may sample that id as text, as the engine takes it
then; here embeddings go where a batch says that an image is, and nowhere else.
"""

from typing import Any

import torch

from prime_hpc.trainer.batching.image_inputs import ImageInputs, MicroBatchImages, as_tensors


def forward_with_images(
    body: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, images: MicroBatchImages
) -> torch.Tensor:
    """Return the last hidden states, `[rows, L, width]`.

    Args:
        body: the model without its head, of `families.VISION`.
        input_ids: int64[rows, L].
        position_ids: int64[4, rows, L], see `ImageInputs.lay_out`.
    """
    embeddings, behind = image_embeddings(body, images)
    of_text = body.get_input_embeddings()(input_ids)
    mixed = of_text.flatten(0, 1).index_copy(0, images.tokens, embeddings.to(of_text.dtype)).view_as(of_text)
    more: dict[str, Any] = {}
    if behind:
        seen = torch.zeros(input_ids.numel(), dtype=torch.bool, device=input_ids.device)
        seen[images.tokens] = True
        more = {"visual_pos_masks": seen.view_as(input_ids), "deepstack_visual_embeds": behind}
    output = body.language_model(inputs_embeds=mixed, position_ids=position_ids, use_cache=False, **more)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def image_embeddings(body: Any, images: MicroBatchImages) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return `[tokens, width]` in the place of the images' tokens, and what is added behind each of the first blocks
    (DeepStack, arXiv 2406.04334)."""
    found = body.get_image_features(images.pixel_values, images.grid_thw)
    behind = [torch.cat(list(layer)) for layer in getattr(found, "deepstack_features", None) or []]
    return torch.cat(list(found.pooler_output)), behind


def nothing_of_images(body: Any, inputs: ImageInputs, device: torch.device) -> torch.Tensor:
    """Return a 0 that depends on all that makes embeddings of images: ranks then reduce the same gradients, whichever
    of them hold an image."""
    blank = as_tensors([inputs.blank()])
    embeddings, behind = image_embeddings(
        body, MicroBatchImages(blank.pixel_values.to(device), blank.grid_thw.to(device), blank.tokens)
    )
    return torch.stack([part.float().sum() for part in (embeddings, *behind)]).sum() * 0.0
