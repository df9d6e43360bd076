"""Errors of the older interface, which packages raise, catch and name in `stop_errors`, and its prompts for answers in
a box. One that reaches the rollout fails it: no reward is made up for what broke."""

THINK_BOXED_SYSTEM_PROMPT = (
    "Think step-by-step inside <think>...</think> tags. Then, give your final answer inside \\boxed{}."
)
BOXED_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


class Error(Exception):
    """The base of all."""


class ModelError(Error):
    """The model did not answer."""


class InvalidModelResponseError(ModelError):
    """Its answer cannot be used."""


class EmptyModelResponseError(InvalidModelResponseError):
    """It holds nothing."""


class OverlongPromptError(Error):
    """The prompt is longer than the model's context."""


class ToolError(Error):
    """A tool failed."""


class ToolParseError(ToolError):
    """The arguments of a call cannot be read."""


class ToolCallError(ToolError):
    """A call raised."""


class InfraError(Error):
    """Something around the rollout failed."""


class SandboxError(InfraError):
    """A sandbox did."""


class TunnelError(InfraError):
    """A tunnel did."""
