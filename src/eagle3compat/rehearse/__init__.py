"""The whole extraction on a small model of the same architecture, before the real one is loaded.

config    reads a published config: where the text model is, and of which kind each of its layers is
shrink    a small config of the same architecture
estimate  what the real model needs: weights, KV cache, host memory, disk
folder    the small model on disk: config, tokenizer, code of its own; no weights
loader    random weights of a sensible size, drawn in each worker
prompts   a short batch, and one that is more than a step takes
child     runs the stock generator on it, in a process of its own
rehearsal all of it in order, and the verdict; show prints it
"""
