"""Picture: what an image or video model is to read from now on, beside what tells it where a patch is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import PosSwapError, nearest

LINEAR, CONVOLUTION = "linear", "convolution"
FORMS = (LINEAR, CONVOLUTION)
CONFIG_KEYS = frozenset({"image_size", "patch_size", "tubelet_size", "num_frames", "num_channels"})

Size = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is given of it; the rest stays. Raises PosSwapError for a value that no model could take.

    image_size: pixels, one number or (height, width). patch_size: pixels of a patch, the same, or (frames, height,
    width) of a tubelet. num_frames: of a video. num_channels: of a pixel. patch_form: how a patch is embedded, by one
    product of matrices (`linear`) or by a `convolution`; the same numbers to rounding.
    """

    image_size: int | Size | None = None
    patch_size: int | Size | None = None
    num_frames: int | None = None
    num_channels: int | None = None
    patch_form: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("image_size", 2), ("patch_size", 3)):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            numbers = (value,) if not isinstance(value, (list, tuple)) else value
            if value is not None and not (_positive(*numbers) and len(numbers) <= most):
                raise self.refuse(name, f"is not one or two positive numbers{' (three for video)' * (most - 2)}")
        for name in ("num_frames", "num_channels"):
            if getattr(self, name) is not None and not _positive(getattr(self, name)):
                raise self.refuse(name, "is not a positive integer")
        if self.patch_form not in (None, *FORMS):
            raise self.refuse("patch_form", f"is unknown; {nearest(self.patch_form, FORMS)}")

    @classmethod
    def asked(cls, **given: Any) -> Picture | None:
        """None where nothing is given."""
        return cls(**given) if any(value is not None for value in given.values()) else None

    def given(self) -> dict[str, Any]:
        """What is given, ready for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.given().items())

    def sizes(self, grid: Size, patch: Size) -> tuple[Size, Size]:
        """(patches, pixels of a patch) along each axis, of a model that has those; frames come first in a video.

        Raises PosSwapError where the pixels of an axis are not whole patches.
        """
        axes, size = len(grid), tuple(n * side for n, side in zip(grid, patch, strict=True))
        new_patch = self._along("patch_size", patch)
        new_size = self._along("image_size", size)
        if self.num_frames is not None:
            if axes < 3:
                raise self.refuse("num_frames", "is for video, and this model reads images")
            new_size = (self.num_frames, *new_size[1:])
        if any(s % side for s, side in zip(new_size, new_patch, strict=True)):
            if self.image_size is None and self.num_frames is None:
                raise self.refuse("patch_size", f"does not divide the image size {_said(size)}; give image_size too")
            name = "image_size" if self.num_frames is None or new_size[0] % new_patch[0] == 0 else "num_frames"
            raise self.refuse(name, f"is not one or two multiples of the patch size {_said(new_patch)}")
        return tuple(s // side for s, side in zip(new_size, new_patch, strict=True)), new_patch

    def _along(self, name: str, present: Size) -> Size:
        """A size along every axis; one number is that of both sides, and what is not given stays."""
        value = getattr(self, name)
        if value is None:
            return present
        given = (value, value) if isinstance(value, int) else value * 2 if len(value) == 1 else value
        if len(given) > len(present):
            raise self.refuse(name, f"has {len(given)} numbers, and this model's patches {len(present)} sides")
        return (*present[: len(present) - len(given)], *given)

    def refuse(self, name: str, reason: str) -> PosSwapError:
        return PosSwapError(f"{name}={getattr(self, name)!r} {reason}")


def _positive(*numbers: Any) -> bool:
    return bool(numbers) and all(type(n) is int and n > 0 for n in numbers)


def _said(size: Size) -> str:
    return str(size[0]) if len(set(size)) == 1 else " x ".join(map(str, size))
