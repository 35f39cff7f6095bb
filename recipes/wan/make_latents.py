"""`python -m recipes.wan.make_latents OUT ...`: videos and texts become what task `wan` reads.

    --videos FOLDER --wan PIPELINE    encode them with the autoencoder and the text encoder of a local
                                      folder such as Wan2.2-T2V-A14B-Diffusers
    --drawn 64                        make smooth random latents up, to try things out

A video is a folder of images, in the order of their names, with its text beside it: `cat/0001.png ...`
and `cat.txt`. `ffmpeg -i cat.mp4 -r 16 cat/%04d.png` makes one of a film. Each video becomes one file;
encoded ones that are in OUT already are left as they are.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.wan.latents import LATENTS, WORDS

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
COARSE = 8
"""Made-up latents vary over so many places, or frames."""


def main(arguments: Sequence[str]) -> int:
    """See the module's description; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.wan.make_latents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="folder for the files")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--videos", type=Path, help="folder of folders of images, and of texts")
    source.add_argument("--drawn", type=int, help="make so many up")
    parser.add_argument("--wan", type=Path, help="diffusers' folder of a pipeline (--videos)")
    parser.add_argument(
        "--frames", type=int, default=81, help="of a video, at most; 1 more than 4 n"
    )
    parser.add_argument("--height", type=int, default=480, help="of a video; images are cut to it")
    parser.add_argument("--width", type=int, default=832, help="likewise")
    parser.add_argument("--words", type=int, default=512, help="vectors of a text, at most")
    parser.add_argument("--channels", type=int, default=16, help="of latents (--drawn)")
    parser.add_argument("--text-size", type=int, default=4096, help="of a vector (--drawn)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.videos is not None and options.wan is None:
        parser.error("--videos needs --wan, the folder of a pipeline")
    options.out.mkdir(parents=True, exist_ok=True)
    made = drawn(options) if options.videos is None else encoded(options)
    number = 0
    for name, latents_CFHW, words_SD in made:
        save(options.out / f"{name}.safetensors", name, latents_CFHW, words_SD)
        number += 1
        print(f"{name}: latents {tuple(latents_CFHW.shape)}, words {tuple(words_SD.shape)}")
    print(f"{number} files are new in {options.out}")
    return 0


def save(path: Path, name: str, latents_CFHW: Tensor, words_SD: Tensor) -> None:
    """One video's file, whole or not at all."""
    parts = {LATENTS: latents_CFHW, WORDS: words_SD}
    stored = {f"{name}/{what}": part.bfloat16().cpu().contiguous() for what, part in parts.items()}
    temporary = path.with_suffix(".part")
    save_file(stored, temporary)
    temporary.rename(path)


def drawn(options: argparse.Namespace) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Smooth noise of unit variance, and texts of several lengths."""
    frames = (options.frames - 1) // 4 + 1
    size = (frames, options.height // 8, options.width // 8)
    for number in range(options.drawn):
        generator = torch.Generator().manual_seed(number)
        coarse = [min(COARSE, n) for n in size]
        grid = torch.randn(1, options.channels, *coarse, generator=generator)
        smooth = nn.functional.interpolate(grid, size, mode="trilinear", align_corners=False)[0]
        length = int(torch.randint(1, options.words + 1, (), generator=generator))
        words = torch.randn(length, options.text_size, generator=generator)
        yield f"drawn-{number:05d}", smooth / smooth.std(), words


def encoded(options: argparse.Namespace) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every video that has a text and no file yet."""
    from diffusers import AutoencoderKLWan
    from transformers import AutoTokenizer, UMT5EncoderModel

    vae = AutoencoderKLWan.from_pretrained(options.wan / "vae").to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.wan / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(options.wan / "text_encoder", dtype=torch.bfloat16)
    encoder = encoder.to(options.device).eval()
    for text in sorted(options.videos.glob("*.txt")):
        folder = text.with_suffix("")
        if (options.out / f"{folder.name}.safetensors").exists():
            continue
        if not folder.is_dir():
            print(f"{text} has no folder of images beside it: left out", file=sys.stderr)
            continue
        video_FHWC = read_images(folder, options.frames, options.height, options.width)
        words = encode_text(encoder, tokenizer, text.read_text(), options.words)
        yield folder.name, encode_video(vae, video_FHWC), words


def read_images(folder: Path, frames: int, height: int, width: int) -> Tensor:
    """(F, H, W, 3) uint8: the first images, as many as make whole frames of latents (1 more than 4 n).

    Each is scaled so that it covers the size, and cut at its sides.
    """
    from PIL import Image, ImageOps

    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGES)[:frames]
    if not files:
        raise SystemExit(f"{folder} holds no images ({', '.join(sorted(IMAGES))})")
    files = files[: (len(files) - 1) // 4 * 4 + 1]
    made = []
    for file in files:
        with Image.open(file) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
        made.append(torch.from_numpy(np.array(fitted)))
    return torch.stack(made)


@torch.no_grad()
def encode_video(vae: Any, video_FHWC: Tensor) -> Tensor:
    """Latents (C, F, H, W), the likeliest ones, normalized as the autoencoder's configuration says."""
    video = video_FHWC.permute(3, 0, 1, 2)[None].to(vae.device, vae.dtype) / 127.5 - 1
    latents_CFHW: Tensor = vae.encode(video).latent_dist.mode()[0].float()
    mean, std = (
        torch.tensor(values, device=latents_CFHW.device).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents_CFHW - mean) / std


@torch.no_grad()
def encode_text(encoder: Any, tokenizer: Any, text: str, longest: int) -> Tensor:
    """Vectors (S, D) of a text, in one line, without padding."""
    tokens = tokenizer(
        " ".join(text.split()), truncation=True, max_length=longest, return_tensors="pt"
    ).to(encoder.device)
    words_SD: Tensor = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    return words_SD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
