"""Attention: its kernel, the layout of its gradient, and its output that checkpointing keeps."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.blocks import blocks
from lightning_modules.execution import attention
from lightning_modules.execution.attention import CUDNN_FIRST, DenseGradient
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.execution.compilation import compile_blocks
from tests.support.steps import family, inputs, made, step, with_a_block_of_each_kind
from tests.support.tiny_pipelines import every_model


class Attended(TorchDispatchMode):
    """Counts attention's forward passes, and whether the gradients of its output are contiguous."""

    def __init__(self):
        super().__init__()
        self.forward, self.dense = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("aten::_scaled_dot_product"):
            if "backward" in func.name():  # (B, H, S, D)
                self.dense.append(args[0].transpose(1, 2).is_contiguous())
            else:
                self.forward += 1
        return func(*args, **kwargs or {})


@every_model
def test_gradient_of_attention_is_dense(repositories, model):
    """Otherwise cuDNN's backward pass is that of another layout (PyTorch's pull request 191576)."""
    module = family(repositories[model], model, "model.gradient_checkpointing=none")
    with Attended() as attended:
        module.denoise(*inputs(module)).square().mean().backward()
    assert attended.forward >= len(blocks(module.transformer))
    assert len(attended.dense) >= attended.forward - 1  # the first of a family may have inputs without a gradient
    assert all(attended.dense)


def test_gradient_of_single_blocks_would_not_be_dense(tiny, monkeypatch):
    monkeypatch.setattr(DenseGradient, "apply", lambda x: x)
    with Attended() as attended:
        step(made(tiny, "lora", "float32"))
    assert not all(attended.dense)
    assert any(attended.dense)


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("every_2", 0), ("attention", 0), ("full", 1)])
def test_attention_is_kept(tiny, policy, again):
    module = made(tiny, "tlora", "bf16")
    count = len(blocks(module.transformer))
    set_checkpointing(module.transformer, policy, module.execution.recomputed)
    with Attended() as attended:
        step(module)
    assert attended.forward == count * (1 + again)
    assert attended.dense == [True] * count


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "again"), [("attention", 0), ("full", 1)])
def test_compiled_blocks_keep_attention_and_send_dense_gradients(tiny, monkeypatch, policy, again):
    forward, dense = [], []

    def look(graph, example):
        for node in graph.graph.nodes:
            if str(node.target).startswith("aten._scaled_dot_product") and "backward" in str(node.target):
                dense.append(node.args[0].meta["val"].transpose(1, 2).is_contiguous())
            elif str(node.target).startswith("aten._scaled_dot_product"):
                forward.append(node)
        return make_boxed_func(graph.forward)

    partition = {"partition_fn": min_cut_rematerialization_partition}
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, **partition)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    module = with_a_block_of_each_kind(made(tiny, "tlora", "bf16"))
    count = len(blocks(module.transformer))
    compile_blocks(module.transformer, False, policy, module.execution.recomputed)
    step(module)
    assert len(forward) == count * (1 + again)
    assert dense == [True] * count
    torch._dynamo.reset()


@pytest.mark.slow
def test_cudnn_comes_first_where_there_is_no_mask(tiny, monkeypatch):
    """Long eager steps and all compiled ones prefer it; the order is part of a graph."""
    module, seen = with_a_block_of_each_kind(made(tiny, "lora", "bf16")), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    attention.set_attention_backend(module.transformer, None, torch.device("cuda"))
    own = torch.nn.functional.scaled_dot_product_attention

    def look(*args, **kwargs):
        seen.append(torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True))
        return own(*args, **kwargs)

    def compiler(graph, example):
        order, found = None, []
        for node in graph.graph.nodes:
            if node.target is torch.nn.attention._sdpa_kernel:
                order = [getattr(SDPBackend, one.args[0]) for one in node.args[0]]
            elif node.target is own:
                found.append(order)
        seen.append(found)
        return graph.forward

    with monkeypatch.context() as eager:
        eager.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
        step(module)
        assert not any(order[0] == SDPBackend.CUDNN_ATTENTION for order in seen), "short"
        seen.clear()
        eager.setattr(attention, "CUDNN_EAGER", 16)
        step(module)
    assert seen == [CUDNN_FIRST] * len(blocks(module.transformer))
    seen.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    torch._dynamo.reset()
    compile_blocks(module.transformer, False, "none", module.execution.recomputed)
    step(module)
    assert seen == [[CUDNN_FIRST]] * len(blocks(module.transformer))
    torch._dynamo.reset()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    attention.set_attention_backend(module.transformer, None, torch.device("cpu"))


def test_masked_attention_is_not_cudnn_s(repositories, monkeypatch):
    module, seen = family(repositories["qwen_image_edit"], "qwen_image_edit"), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    attention.set_attention_backend(module.transformer, None, torch.device("cuda"))
    own = torch.nn.functional.scaled_dot_product_attention

    def look(*args, **kwargs):
        seen.append((kwargs["attn_mask"] is None, torch.backends.cuda.cudnn_sdp_enabled()))
        return own(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    monkeypatch.setattr(attention, "CUDNN_EAGER", 1)
    x_t, t, controls, prompt = inputs(module)
    module.denoise(x_t, t, controls, prompt)
    module.denoise(x_t, t, controls, {name: one for name, one in prompt.items() if not name.endswith("_mask")})
    assert set(seen) == {(False, False), (True, True)}
    attention.set_attention_backend(module.transformer, None, torch.device("cpu"))
