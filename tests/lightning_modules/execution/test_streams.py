"""Streamed blocks on copies that come late: the same bits, in a defined order."""

import gc

import pytest
import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from lightning_modules.execution.offload import SideStream
from tests.support.steps import assert_same, made, step
from tests.support.streams import Streams
from tests.support.tiny_adapters import velocity


def offloading(tiny, adapter, base):
    return made(tiny, adapter, base, "model.gradient_checkpointing=full", "model.offload.blocks=4")


def test_steps_on_late_streams_have_the_same_bits(tiny):
    """Four blocks take turns in two buffers."""
    plain = step(made(tiny, "tlora", "fp8"))
    with Streams(None) as streams:
        module = offloading(tiny, "tlora", "fp8")
        for _ in range(2):
            assert_same(step(module), plain)
        assert streams.copies >= 4
    assert not any(stream.waiting for stream in streams.streams)


def image(module):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return velocity(module, [0.2, 0.7])


def test_images_on_late_streams_have_the_same_bits(tiny):
    """Without gradients blocks go round and round."""
    expected = image(made(tiny, "lora", "bf16"))
    with Streams(1):
        module = offloading(tiny, "lora", "bf16")
        assert all(torch.equal(image(module), expected) for _ in range(3))


def test_model_may_go_while_a_block_is_on_its_way(tiny):
    """Its first block is being copied for the next image."""
    with Streams(None) as streams:
        module = offloading(tiny, "lora", "bf16")
        image(module)
        assert sum(len(stream.waiting) for stream in streams.streams) == 1
        del module
        gc.collect()


class NoWait(SideStream):
    """Computes without waiting for a copy."""

    def wait(self, copied):
        pass


def test_event_that_is_left_out_is_found(tiny):
    with pytest.raises(CUDASanitizerErrors), Streams(None, NoWait):
        step(offloading(tiny, "lora", "bf16"))
