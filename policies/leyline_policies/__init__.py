"""Bundled Leyline policies: one small file each."""

BUNDLED = {
    "attention-mass": "leyline_policies.attention_mass:AttentionMass",
    "clear-thinking": "leyline_policies.clear_thinking:ClearThinking",
    "clear-tool-uses": "leyline_policies.clear_tool_uses:ClearToolUses",
    "ephemeral-tags": "leyline_policies.ephemeral_tags:EphemeralTags",
    "last-n-observations": "leyline_policies.last_n_observations:LastNObservations",
    "redact": "leyline_policies.redact:Redact",
    "stale-tool-detector": "leyline_policies.stale_tool_detector:StaleToolDetector",
    "tiered": "leyline_policies.tiered:Tiered",
    "token-budget": "leyline_policies.token_budget:TokenBudget",
    "transform": "leyline_policies.transform:Transform",
    "truncate-older-than-n": "leyline_policies.truncate_older_than_n:TruncateOlderThanN",
}
"""Name to class. The same table stands in ``pyproject.toml`` as entry points; a test compares them."""
