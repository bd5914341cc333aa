"""The comparison that tests/gpu prints, on the host: every way brings the same rows."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from engram import synth
from step_overhead import AIM, CAPTURED, PINNED, STAGE, excess, median_seconds, report


def test_every_way_brings_the_same_rows(tmp_path):
    info = synth.write(tmp_path / "c", "qwen", rows=5000, dtype="fp8")
    found = median_seconds(info.directory, "cpu", rounds=2)
    assert len(found) == 5
    rows = [rows for _, rows in found.values()]
    assert rows[0].shape == (1024, 160)
    assert rows[0].any()
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])
    assert f"{found[STAGE][0] * 1e6:.1f} us" in report(found)[0]


@pytest.mark.parametrize(("seconds", "verdict"), [(49e-6, "ok"), (51e-6, "MISSED")])
def test_the_aim_is_told(seconds, verdict):
    found = {STAGE: (1e-5 + seconds, None), PINNED: (1e-5, None)}
    assert verdict in report(found)[-1]
    barest = {**found, PINNED: (9.0, None), CAPTURED: (1e-5, None)}
    assert verdict in report(barest)[-1]
    assert (excess(found) <= AIM) == (excess(barest) <= AIM) == (verdict == "ok")
