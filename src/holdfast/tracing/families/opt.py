"""OPT, which scales its queries before the kernel."""

from holdfast.tracing.family import Family, register_family

register_family(
    Family(
        "opt",
        "transformers",
        ("OPTAttention",),
        maps=("q_proj", "k_proj", "v_proj"),
        out="out_proj",
        prescaled=True,
    )
)
