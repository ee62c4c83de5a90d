"""Streamed blocks on copies that come late: the same bits, in a defined order."""

import gc

import pytest
import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from lightning_modules.execution.offload import SideStream
from tests.support.combinations import first
from tests.support.steps import assert_same, made, step
from tests.support.streams import Streams
from tests.support.tiny_adapters import velocity


def offloading(tiny, adapter, base, blocks):
    return made(tiny, adapter, base, "model.gradient_checkpointing=full", f"model.offload.blocks={blocks}")


@pytest.mark.parametrize(("blocks", "seed"), first(1, [(4, None), (1, 1)]))
def test_steps_on_late_streams_have_the_same_bits(tiny, blocks, seed):
    """One block leaves gaps; four take turns in two buffers."""
    plain = step(made(tiny, "tlora", "fp8"))
    with Streams(seed) as streams:
        module = offloading(tiny, "tlora", "fp8", blocks)
        for _ in range(2):
            assert_same(step(module), plain)
        assert streams.copies >= blocks
    assert not any(stream.waiting for stream in streams.streams)


def image(module):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return velocity(module, [0.2, 0.7])


def test_images_on_late_streams_have_the_same_bits(tiny):
    """Without gradients blocks go round and round."""
    expected = image(made(tiny, "lora", "bf16"))
    with Streams(1):
        module = offloading(tiny, "lora", "bf16", 4)
        assert all(torch.equal(image(module), expected) for _ in range(3))


def let_go(tiny, side_stream):
    """Build a model whose first block is being copied for the next image."""
    with Streams(None, side_stream) as streams:
        module = offloading(tiny, "lora", "bf16", 4)
        image(module)
        assert sum(len(stream.waiting) for stream in streams.streams) == 1
        del module
        gc.collect()


def test_model_may_go_while_a_block_is_on_its_way(tiny):
    let_go(tiny, SideStream)


class NoWait(SideStream):
    """Computes without waiting for a copy."""

    def wait(self, copied):
        pass


class NoOrder(SideStream):
    """Copies without waiting for what was computed before."""

    def copy(self, sources, targets):
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class NoUses(SideStream):
    """Lets buffers go while copies into them are under way."""

    def uses(self, tensor):
        pass


@pytest.mark.parametrize("without", first(1, [NoWait, NoOrder]))
def test_event_that_is_left_out_is_found(tiny, without):
    with pytest.raises(CUDASanitizerErrors), Streams(None, without):
        step(offloading(tiny, "lora", "bf16", 4))


def test_buffer_that_goes_before_its_copy_is_found(tiny):
    with pytest.raises(CUDASanitizerErrors):
        let_go(tiny, NoUses)
