"""The states as a mapping from parameters, made from the storage when they are looked at."""

from collections.abc import ItemsView, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from swap_optimizer.layout import Entry, Slice

if TYPE_CHECKING:
    from swap_optimizer.storage import Storage


class StateView(Mapping[Tensor, Mapping[str, Any]]):
    """What ``optimizer.state`` is: parameters that have a state, and their tensors.

    The tensors are the storage itself; a parameter's keys cannot be changed. A parameter without a
    state has an empty one, as with torch's optimizers.
    """

    def __init__(self, storage: "Storage") -> None:
        self._storage = storage
        self._places: dict[int, tuple[Slice, int]] = {}

    def add(self, s: Slice) -> None:
        for i, param in enumerate(s.params):
            self._places[id(param)] = s, i

    def _values(self, param: object) -> dict[str, Any]:
        place = self._places.get(id(param))
        if place is None or (layout := place[0].layout) is None:
            return {}
        s, i = place
        values = layout.values[i]
        shown = self._storage.show(s, [v for v in values.values() if isinstance(v, Entry)])
        return {key: shown[v] if isinstance(v, Entry) else v for key, v in values.items()}

    def __getitem__(self, param: Tensor) -> Mapping[str, Any]:
        if id(param) not in self._places:
            raise KeyError(param)
        return MappingProxyType(self._values(param))

    def __setitem__(self, param: Tensor, values: object) -> None:
        raise TypeError("states of a SwapOptimizer are set by load_state_dict")

    def __contains__(self, param: object) -> bool:
        s, i = self._places.get(id(param), (None, 0))
        return s is not None and s.layout is not None and bool(s.layout.values[i])

    def __iter__(self) -> Iterator[Tensor]:
        for s, i in self._places.values():
            if s.layout is not None and s.layout.values[i]:
                yield s.params[i]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> ItemsView[Tensor, dict[str, Any]]:
        """As dicts of their own, which is what a state_dict is made of."""
        return {param: self._values(param) for param in self}.items()
