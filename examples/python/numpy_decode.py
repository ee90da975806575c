"""Decode with NumPy arrays (torch is not needed): a pool of states, one row per slot, updated in place."""

import numpy as np

import gdn.numpy

B, Hk, Hv, K, V, slots = 3, 2, 4, 64, 64, 8
rng = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


pool = np.zeros((slots, Hv, K, V), np.float32)
indices = np.array([5, -1, 2], np.int32)  # the second request is padding
for _ in range(4):
    o, _ = gdn.numpy.recurrent(
        random(B, 1, Hk, K),
        random(B, 1, Hk, K),
        random(B, 1, Hv, V),
        g=-np.abs(random(B, 1, Hv)),
        beta=rng.random((B, 1, Hv), dtype=np.float32),
        qk_l2norm=True,
        initial_state=pool,
        initial_state_indices=indices,
        final_state=pool,
    )

print("o:", o.shape, "slots in use:", np.flatnonzero(np.abs(pool).sum(axis=(1, 2, 3))))
assert np.isfinite(o).all() and (o[1] == 0).all()
assert set(np.flatnonzero(np.abs(pool).sum(axis=(1, 2, 3)))) == {2, 5}

try:
    gdn.numpy.recurrent(random(B, 1, Hk, K), random(B, 1, Hk, K), random(B, 1, 3, V))
except gdn.InvalidArgumentError as error:
    print("refused:", error)
else:
    raise AssertionError("3 value heads are no multiple of 2 key heads")
