"""What transformers says the streams of prompts with images are: `python image_reference.py MODEL PROMPTS.json OUT.pt`.

PROMPTS holds for each prompt `token_ids`, with as many of the image's token as there are, and `images`, paths of
pictures in their order. OUT holds for each a dict of lists, in float32 and a layer each, `[tokens, hidden_size]`:

`entering`  what enters the next layer, or the final norm after the last: the stream
`leaving`   what the layer returns
`reported`  `output_hidden_states`, without the embeddings; its last has been through the final norm
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

from reference import decoder_layers


def norm_after(model: Any, layers: torch.nn.ModuleList) -> torch.nn.Module:
    """The final norm: the module of that name beside the list of decoder layers."""
    (owner,) = [module for module in model.modules() if any(child is layers for child in module.children())]
    norm: torch.nn.Module = owner.norm
    return norm


def inputs_of(prompt: dict[str, Any], model: Any, processor: Any) -> dict[str, Any]:
    from PIL import Image

    ids = torch.tensor([prompt["token_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    takes = inspect.signature(model.forward).parameters
    if prompt["images"]:
        made = processor(images=[Image.open(path) for path in prompt["images"]], return_tensors="pt")
        for name in made.keys() & takes.keys():  # Llama 4's pixels are in bf16
            inputs[name] = made[name].float() if made[name].is_floating_point() else made[name]
    for name in {"mm_token_type_ids", "token_type_ids"} & takes.keys():
        inputs[name] = (ids == model.config.image_token_id).long()
    return inputs


def main() -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    MoeCausalLMOutputWithPast.image_outputs = None  # which Llama 4 of transformers 5.24 asks for and has not
    folder, prompts, out = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").float().eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    layers = decoder_layers(getattr(model, "model", model).language_model)
    entering: list[torch.Tensor] = []
    leaving: list[torch.Tensor] = []

    def enters(_module: Any, args: Any, kwargs: Any) -> None:
        entering.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    def leaves(_module: Any, _args: Any, output: Any) -> None:
        leaving.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    for layer in layers:
        layer.register_forward_hook(leaves)
    for module in (*layers[1:], norm_after(model, layers)):
        module.register_forward_pre_hook(enters, with_kwargs=True)
    found = []
    for prompt in prompts:
        entering.clear()
        leaving.clear()
        with torch.inference_mode():
            output = model(**inputs_of(prompt, model, processor), output_hidden_states=True, use_cache=False)
        reported = [state[0].clone() for state in output.hidden_states[1:]]
        found.append({"entering": [*entering], "leaving": [*leaving], "reported": reported})
    torch.save(found, out)


if __name__ == "__main__":
    main()
