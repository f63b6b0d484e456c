"""What Kimi-K2.5 brings beside its weights, as far as vLLM 0.16 asks for it: a config class and an image processor."""

import math
from typing import ClassVar

import numpy as np
import torch
from transformers import BatchFeature, DeepseekV3Config, PretrainedConfig
from transformers.image_processing_utils import BaseImageProcessor


class Vision(PretrainedConfig):
    model_type = "kimi_k25_vision"


class Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, **rest):
        self.text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = Vision(**(vision_config or {}))
        super().__init__(**rest)


class Media(BaseImageProcessor):
    """Cuts images into patches of 14 pixels, four of which become one token."""

    model_input_names: ClassVar[list[str]] = ["pixel_values", "grid_thws"]
    num_frames_per_chunk = 4
    patch = 14

    def __init__(self, most_patches=1024, **rest):
        super().__init__(**rest)
        self.most_patches = most_patches

    def grid(self, chunk):
        frames = chunk["video_chunk"] if chunk["type"] == "video_chunk" else [chunk["image"]]
        width, height = frames[0].size
        scale = min(1.0, math.sqrt(self.most_patches * self.patch**2 / (width * height)))
        side = 2 * self.patch
        rows, columns = (max(int(n * scale) // side, 1) * 2 for n in (height, width))
        return frames, rows, columns

    def media_tokens_calculator(self, chunk):
        _frames, rows, columns = self.grid(chunk)
        return rows * columns // 4

    def preprocess(self, chunks, return_tensors=None, **_options):
        pixels, grids = [], []
        for chunk in chunks:
            frames, rows, columns = self.grid(chunk)
            for frame in frames:
                resized = frame.convert("RGB").resize((columns * self.patch, rows * self.patch))
                values = torch.from_numpy(np.asarray(resized)).float() / 127.5 - 1
                cut = values.view(rows, self.patch, columns, self.patch, 3).permute(0, 2, 4, 1, 3)
                pixels.append(cut.reshape(-1, 3, self.patch, self.patch))
            grids.append([len(frames), rows, columns])
        return BatchFeature({"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)})
