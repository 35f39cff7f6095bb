"""Files of latents: made, read, joined, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.task import DataError
from recipes.wan.latents import Stored, collate, find_entries, is_held_out
from recipes.wan.make_latents import encode_text, encode_video, main, read_images

SMALL = ("--frames", "9", "--height", "32", "--width", "48", "--words", "6", "--channels", "3",
         "--text-size", "10")  # fmt: skip


def made(folder, number=5):
    assert main([str(folder), "--drawn", str(number), *SMALL]) == 0
    return Stored(find_entries([str(folder / "*.safetensors")]))


def test_made_up_latents_are_read_back(tmp_path, capsys):
    videos = made(tmp_path)
    assert "5 files are new in" in capsys.readouterr().out
    assert len(videos) == 5
    assert videos.shapes() == {(3, 3, 4, 6)}
    video = videos[2]
    stored = load_file(tmp_path / "drawn-00002.safetensors")
    assert torch.equal(video.latents_CFHW, stored["drawn-00002/latents"].float())
    assert torch.equal(video.words_SD, stored["drawn-00002/words"].float())
    assert video.latents_CFHW.std() == pytest.approx(1, abs=0.01)
    assert videos.fingerprint() == made(tmp_path / "again").fingerprint()
    assert videos.fingerprint() != made(tmp_path / "more", 6).fingerprint()


def test_texts_are_filled_up_with_zeros(tmp_path):
    videos = made(tmp_path)
    batch = collate([videos[n] for n in range(5)], max_words=8)
    assert batch["latents_BCFHW"].shape == (5, 3, 3, 4, 6)
    for number in range(5):
        words = videos[number].words_SD
        assert torch.equal(batch["words_BSD"][number, : len(words)], words)
        assert not batch["words_BSD"][number, len(words) :].any()


def test_a_file_may_hold_several_videos_of_other_sizes(tmp_path):
    tensors = {}
    for name, frames in (("a", 1), ("b/c", 2)):
        tensors |= {
            f"{name}/latents": torch.randn(3, frames, 4, 4),
            f"{name}/words": torch.randn(2, 10),
        }
    save_file(tensors, tmp_path / "x.safetensors")
    videos = Stored(find_entries([str(tmp_path / "*")]))
    assert [entry.name for entry in videos.entries] == ["a", "b/c"]
    assert torch.equal(videos[1].latents_CFHW, tensors["b/c/latents"])
    with pytest.raises(DataError, match="are in one micro-batch: set trainer.micro_batch_size=1"):
        collate([videos[0], videos[1]], 4)


def test_what_is_no_video_is_named(tmp_path):
    with pytest.raises(DataError, match="no file matches .*: set data.files"):
        find_entries([str(tmp_path / "*")])
    save_file({"a/latents": torch.randn(3, 1, 4, 4)}, tmp_path / "x.safetensors")
    with pytest.raises(DataError, match=r"a is no video: a/latents .* as recipes.wan.make_latents"):
        find_entries([str(tmp_path / "*")])
    (tmp_path / "x.safetensors").write_text("no")
    with pytest.raises(DataError, match=r"cannot read .*x.safetensors"):
        find_entries([str(tmp_path / "*")])


def test_held_out_videos_stay_so_when_more_come(tmp_path):
    few = {e.name for e in made(tmp_path, 40).entries if is_held_out(e, 0.3)}
    many = {e.name for e in made(tmp_path, 60).entries if is_held_out(e, 0.3)}
    assert few < many
    assert 4 < len(few) < 22


def test_images_and_a_text_become_latents_and_vectors(tmp_path, capsys):
    """By a tiny autoencoder and text encoder, in the folders that a pipeline has."""
    pytest.importorskip("diffusers")
    from diffusers import AutoencoderKLWan
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    mean, std = [0.1, -0.2, 0.3], [2.0, 0.5, 1.5]
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=3,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=mean,
        latents_std=std,
    )
    vae.save_pretrained(tmp_path / "wan" / "vae")
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=20, d_model=10, d_kv=5, d_ff=16, num_layers=1, num_heads=2)
    )
    encoder.save_pretrained(tmp_path / "wan" / "text_encoder")
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", "a", "cat", "sits"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "wan" / "tokenizer")

    videos = tmp_path / "videos"
    (videos / "cat").mkdir(parents=True)
    for number in range(7):
        Image.new("RGB", (50, 40), (number * 30, 90, 200)).save(videos / "cat" / f"{number:03}.png")
    (videos / "cat.txt").write_text("a cat\n sits\n")
    (videos / "alone.txt").write_text("nothing")
    command = [str(tmp_path / "out"), "--videos", str(videos), "--wan", str(tmp_path / "wan"),
               "--height", "16", "--width", "24", "--device", "cpu"]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr()
    assert "alone.txt has no folder of images beside it" in said.err
    assert "cat: latents (3, 2, 2, 3), words (3, 10)" in said.out
    assert main(command) == 0
    assert "0 files are new" in capsys.readouterr().out

    frames = read_images(videos / "cat", 81, 16, 24)
    assert frames.shape == (5, 16, 24, 3)  # 7 images make 5, which are 2 frames of latents
    assert frames[3, 0, 0].tolist() == [90, 90, 200]
    pixels = frames.permute(3, 0, 1, 2)[None] / 127.5 - 1
    with torch.no_grad():
        plain = vae.eval().encode(pixels).latent_dist.mode()[0]
    wide = (-1, 1, 1, 1)
    expected = (plain - torch.tensor(mean).view(wide)) / torch.tensor(std).view(wide)
    torch.testing.assert_close(encode_video(vae, frames), expected)
    (video,) = find_entries([str(tmp_path / "out" / "*.safetensors")])
    torch.testing.assert_close(Stored([video])[0].latents_CFHW, expected, atol=0.02, rtol=0.01)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "wan" / "tokenizer")
    assert encode_text(encoder, tokenizer, "a cat sits a cat", 4).shape == (4, 10)
    assert json.loads((tmp_path / "wan" / "vae" / "config.json").read_text())["z_dim"] == 3
