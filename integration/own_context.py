"""A context of a user's own, found by its name."""

from titan_custom_cp import DSAContextParallelContext


class OwnContext(DSAContextParallelContext):
    def gather_keys(self, *tensors, dim=1):
        """One all-gather a tensor, in the opposite order."""
        return tuple(super().gather_keys(x, dim=dim)[0] for x in reversed(tensors))[::-1]
