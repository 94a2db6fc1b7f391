"""Section `model`: what is served and how it is computed. Shared by prefill and decode nodes."""

from __future__ import annotations

from dataclasses import dataclass

from moontide.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("safetensors", "dummy", "paced")
KERNELS = ("auto", "native", "torch")
DEFAULT_CONTEXTS = {"prefill": 2, "decode": 4}
"""Full contexts of the model that the pages of a node hold, unless its num_pages says otherwise; by its role."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = "smollm2"
    """The built-in model, or a local Hugging Face directory."""
    dtype: str = "auto"
    """float32 | bfloat16 | auto: bfloat16 where the CPU or GPU computes it natively, else float32."""
    load_format: str = "safetensors"
    """safetensors | dummy: seeded random weights for the directory's config.json | paced: no weights and no arithmetic: each step
    takes the time that `profile` says and writes made-up K/V. For runs at a scale that the machine cannot compute."""
    profile: str = ""
    """JSON file with the step times of load_format=paced: overhead_s, token_s, pair_s, and more (docs/operations.md)."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    kernels: str = "auto"
    """native: our C++ kernels for bfloat16 on CPUs with AVX512-BF16, compiled at first use with g++ | torch: attention in tiles
    of plain torch, on every device | auto: on a CPU native where they run, else torch; on CUDA torch's fused flash and flex
    attention, compiled at first use."""
    threads: int = 1
    """Compute threads of one stage or decode process. More than the free cores is far slower than one."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"model.dtype={self.dtype!r} is not served; choose one of {', '.join(DTYPES)}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(
                f"model.load_format={self.load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}"
            )
        if (self.load_format == "paced") != bool(self.profile):
            raise ConfigError(
                f"model.profile={self.profile!r} does not fit model.load_format={self.load_format!r}: paced needs a profile and "
                "nothing else takes one; set both or neither"
            )
        if self.load_format == "paced" and self.device != "cpu":
            raise ConfigError(
                f"model.device={self.device!r} has nothing to do with load_format=paced; set model.device=cpu"
            )
        if self.kernels not in KERNELS:
            raise ConfigError(f"model.kernels={self.kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
        if self.threads < 1:
            raise ConfigError(f"model.threads={self.threads} must be at least 1")
