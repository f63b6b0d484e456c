"""The driver side: vLLM's own engine core behind the names that the stock generator uses.

core       starts the engine core over worker processes, runs requests to the end, survives faults
preflight  refuses what would fail after the model is loaded
stand_in   what stock sees: an executor, a scheduler and requests that lead to the engine core
"""
