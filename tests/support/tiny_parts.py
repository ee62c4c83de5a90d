"""Parts that several tiny pipelines have."""

from diffusers import FlowMatchEulerDiscreteScheduler

# As Qwen3's, of one turn: without thinking it would answer at once.
QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Of FLUX.1's kind."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        base_shift=0.5,
        max_shift=1.15,
    )
