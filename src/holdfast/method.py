"""What every registered method says about itself: bounds of a layer, and compositions of a network."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, final

from holdfast.errors import HoldfastError


class Method(ABC):
    """A method with a name, a cost, a reference and the assumptions of its proof."""

    name: ClassVar[str]
    cost: ClassVar[str]
    reference: ClassVar[str]
    assumptions: ClassVar[str] = "none"

    @classmethod
    @final
    def check_metadata(cls) -> None:
        """Refuses a class whose metadata is incomplete."""
        missing = [field for field in ("name", "cost", "reference") if not isinstance(getattr(cls, field, None), str)]
        if missing:
            raise HoldfastError(f"{cls.__name__} lacks {', '.join(missing)}; a registered method states all three")
