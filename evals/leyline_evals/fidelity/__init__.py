"""How far amortize's answers are from those of the full context and of a re-prefill, on one served model.

| module | holds |
|---|---|
| ``cases`` | what is asked: constructed and natural conversations with their edits |
| ``prompts`` | a case as token ids, through the server's own chat template |
| ``probe`` | the next-token distributions of one case in every arm |
| ``compare`` | agreement, top-k overlap and KL of two distributions known by their top log probabilities |
| ``card`` | figures per kind, distance, number of edits and arm: the ``fidelity.json`` a server can show in ``info`` |
| ``command`` | ``leyline-evals fidelity`` |
"""
