"""The driver side: vLLM's own engine core behind the names that the stock generator uses.

core       starts the engine core over worker processes, runs requests to the end, survives faults
preflight  refuses what would fail after the model is loaded
media      refuses prompts that stand for images, which token ids do not carry
stand_in   what stock sees: an executor, a scheduler and requests that lead to the engine core
"""
