"""A policy of your own: clear the output of noisy tools after some turns. Try it without a server:

leyline simulate --policy custom_policy:QuietTools:turns=2 transcript.jsonl
"""

from leyline_client.policy import Edit, PolicyBase, Transcript


class QuietTools(PolicyBase):
    name = "quiet-tools"
    summary = "Clears the output of noisy tools once it is old."
    tools: tuple[str, ...] = ("ls", "grep", "run_tests")
    turns: int = 3

    def plan(self, transcript: Transcript) -> list[Edit]:
        old = (result for result in transcript.results(min_age=self.turns) if result.tool in self.tools)
        return [edit for result in old for edit in result.clear("[old output]")]
