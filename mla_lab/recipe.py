"""What each operand of the two matrix products is rounded to, and how the products are summed.

    scores = Q K^T     Q in bf16, in fp8 with a scale, or as the sum of two fp8 terms
    output = P V       P in bf16, in fp8 after a multiplication by the P scale, or as the sum of two fp8 terms

K and V are what the cache holds: neither product rounds them again. Two terms, high and low, are two products with the
same K or V: the low term is what the high one's rounding left, in the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("bf16", "fp8", "fp8x2")
GRANULARITIES = ("head_block", "head", "tensor")
SUMS = ("f32", "fp22", "fp22_promoted")

FP8_RATE = 2.0
"""fp8 products per bf16 product in the same time, by the vendors' dense peaks: MI325X 2,615 and 1,307 TFLOP/s, MI355X
5,033 and 2,517, H200 1,979 and 989."""

LARGEST_SCALE = 2.0**64
"""Scales beyond it, or below its inverse, are refused: f32 still has room for what they multiply."""


@dataclass(frozen=True)
class Recipe:
    """How sparse_mla_fwd rounds. The emulator runs every recipe; the Triton kernels those without "tile", "tensor",
    hadamard and short sums.

    q, p: "bf16", "fp8" or "fp8x2" (two terms).
    p_scale: what an fp8 P is multiplied by before it is rounded: a number; "largest", the largest power of two in the
    encoding's range; "tile", for each query row and tile of keys the largest power of two that keeps the row's largest p
    in range; None, the profile's.
    q_granularity: what shares one scale when an fp8 Q is made: "head_block" (a token's block of 16 heads, as published),
    "head" (one token's head) or "tensor" (all of q).
    hadamard: Q's latent columns are rotated by an orthonormal Hadamard transform before they are rounded, and the output
    is rotated back; the cache must hold rows that cache.rotate has rotated the same way.
    accumulate: how fp8 products are summed: "f32"; "fp22", as Hopper's fp8 units do (numerics.short_sum), the
    accumulator kept there for the whole sum; "fp22_promoted", the same for one tile of 128 columns or one tile of keys,
    whose sum is then added in f32. Products in bf16 are always summed in f32.

    Raises ValueError for another value, or a setting that the q and p beside it leave without effect.
    """

    q: str = "bf16"
    p: str = "bf16"
    p_scale: float | str | None = None
    q_granularity: str = "head_block"
    hadamard: bool = False
    accumulate: str = "f32"

    def __post_init__(self):
        for name, accepted in (("q", PRECISIONS), ("p", PRECISIONS), ("q_granularity", GRANULARITIES), ("accumulate", SUMS), ("hadamard", (False, True))):
            value = getattr(self, name)
            if value not in accepted or isinstance(value, bool) != (name == "hadamard"):
                raise ValueError(f"recipe.{name}: got {value!r}; accepted: {', '.join(map(str, accepted))}")
        if self.p_scale is not None:
            if self.p_scale not in ("largest", "tile"):
                check_scale(self.p_scale, "recipe.p_scale", "None, 'largest', 'tile', or ")
            if self.p == "bf16":
                raise ValueError(f"recipe.p_scale: got {self.p_scale} with a bf16 P; accepted: None, or p='fp8'")
        if self.q_granularity != "head_block" and self.q == "bf16":
            raise ValueError(f"recipe.q_granularity: got {self.q_granularity!r} with a bf16 Q; accepted: 'head_block', or q='fp8'")
        if self.accumulate != "f32" and not self.needs_fp8_cache:
            raise ValueError(f"recipe.accumulate: got {self.accumulate!r} with bf16 products; accepted: 'f32', or an fp8 Q or P")

    @property
    def needs_fp8_cache(self) -> bool:
        return self.q != "bf16" or self.p != "bf16"

    @property
    def dots(self) -> str:
        """Which launch configuration serves it: "fp8" where both products run in fp8, else "bf16"."""
        return "fp8" if self.q != "bf16" and self.p != "bf16" else "bf16"

    def products(self, width: int, rank: int) -> dict[str, int]:
        """Multiply-adds of both matrix products for one query row and one key, by what they run in: {"bf16": n, "fp8": n}."""
        count = {"bf16": 0, "fp8": 0}
        for operand, columns in ((self.q, width), (self.p, rank)):
            count["bf16" if operand == "bf16" else "fp8"] += columns * (2 if operand == "fp8x2" else 1)
        return count

    def matrix_time(self, width: int, rank: int) -> float:
        """What the matrix products take, in units of both products once in fp8, at FP8_RATE."""
        count = self.products(width, rank)
        return (count["fp8"] + FP8_RATE * count["bf16"]) / (width + rank)


def check_scale(value: float, name: str = "p_scale", also: str = "") -> None:
    """ValueError unless `value` is a number from 2^-64 to 2^64."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 / LARGEST_SCALE <= value <= LARGEST_SCALE:
        raise ValueError(f"{name}: got {value!r}; accepted: {also}a number from 2^-64 to 2^64")


BF16_DOTS = Recipe()
FP8_DOTS = Recipe(q="fp8", p="fp8")

DOTS = {"bf16": BF16_DOTS, "fp8": FP8_DOTS}
"""What sparse_mla_fwd's dot_precision names: the published kernel's two."""

NAMED = {
    "bf16": BF16_DOTS,
    "fp8": FP8_DOTS,
    "fp8, P scale 1": Recipe("fp8", "fp8", 1.0),
    "fp8, P scale per tile": Recipe("fp8", "fp8", "tile"),
    "fp8, Q per head": Recipe("fp8", "fp8", "largest", "head"),
    "fp8, Q per tensor": Recipe("fp8", "fp8", "largest", "tensor"),
    "fp8, Hadamard": Recipe("fp8", "fp8", "largest", hadamard=True),
    "fp8, short sums": Recipe("fp8", "fp8", "largest", accumulate="fp22"),
    "fp8, short sums promoted": Recipe("fp8", "fp8", "largest", accumulate="fp22_promoted"),
    "bf16 QK, fp8 PV": Recipe("bf16", "fp8", "largest"),
    "fp8 QK, bf16 PV": Recipe("fp8", "bf16"),
    "two-term Q": Recipe("fp8x2", "fp8", "largest"),
    "two-term Q, bf16 PV": Recipe("fp8x2", "bf16"),
    "two-term P": Recipe("fp8", "fp8x2", "largest"),
    "two-term Q and P": Recipe("fp8x2", "fp8x2", "largest"),
}
"""Recipes by name, for studies. "fp8" is the published one, with the profile's P scale (1 on gfx950)."""
