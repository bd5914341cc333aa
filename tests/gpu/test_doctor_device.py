"""What `engram doctor` finds out about a device that answers."""

from __future__ import annotations

import torch

from engram.cli.doctor import accelerator


def test_devices_are_named_and_host_memory_can_be_registered():
    answer = accelerator.ask()
    assert "failure" not in answer, answer
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(place) for place in range(count)]
    assert answer["devices"] == names
    assert (answer["torch"], answer["cuda"]) == (torch.__version__, torch.version.cuda)
    assert answer["pinned"] is True, answer
    finding = accelerator.torch(answer)
    assert finding.verdict == "ok"
    assert names[0] in finding.found
    assert finding.found.endswith("; host memory can be registered")
