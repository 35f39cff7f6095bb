"""The command itself, in process: every recipe is planned for what it is made for, and fits there."""

import re

import pytest

from trainer.cli import run

MADE_FOR = [
    "+recipe=llama1b launch.nproc=8 launch.device=a100",
    "+recipe=llama8b launch.nproc=8 launch.device=h100",
    "+recipe=llama8b_fsdp_tide launch.nproc=2 launch.device=h200",
    "+recipe=llama70b_fsdp_tide model.num_layers=4 launch.nproc=2 launch.device=h200",
]


@pytest.fixture(autouse=True)
def _small_corpus(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a line of text, again and again\n" * 60_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPRINGTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def dry_run(words, capsys):
    small = ["trainer.dry_run=true", "data.files=[text.txt]", "data.holdout=0"]
    code = run([*words.split(), *small])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


@pytest.mark.parametrize("words", MADE_FOR)
def test_recipes_fit_what_they_are_made_for(words, capsys):
    shown = dry_run(words, capsys)
    assert "does not fit" not in shown
    for name in ("layout", "memory a rank", "wire a step", "a step", "the run"):
        assert f"\n{name} " in shown
    assert " mfu " in shown


def test_70b_on_64_ranks(capsys):
    shown = dry_run(
        "+recipe=llama70b parallel.shard=64 launch.device=h100 model.num_layers=8", capsys
    )
    assert "8 nodes of 8" in shown
    assert "GB of it between nodes" in shown


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("+recipe=llama1b launch.nproc=1 trainer.batch_size=2 model.num_layers=2", "trainer.micro_batch_size=1"),
        ("+recipe=llama1b launch.nproc=1 trainer.batch_size=1 trainer.micro_batch_size=1 model.num_layers=5",
         "parallel.activation_checkpointing=block"),
        ("+recipe=llama8b launch.nproc=1 trainer.batch_size=1 model.num_layers=8", "no single key helps: use more ranks"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_says_which_keys_would_help(words, remedy, capsys):
    shown = dry_run(f"{words} launch.device=l4", capsys)
    (line,) = [line for line in shown.splitlines() if line.startswith("does not fit")]
    assert remedy in line


def test_cpu_ranks_have_no_time(capsys):
    shown = dry_run("+recipe=tiny launch.nproc=4 parallel.node_size=2", capsys)
    assert "2 nodes of 2" in shown
    assert "mfu" not in shown


def test_ranks_that_share_sequences_need_less(capsys):
    needed = []
    for size in (1, 2):
        words = f"+recipe=llama8b model.num_layers=4 launch.nproc=2 launch.device=h200 parallel.sequence.size={size}"
        shown = dry_run(f"{words} trainer.batch_size=2 trainer.micro_batch_size={size}", capsys)
        needed.append(float(re.search(r"memory a rank +([\d.]+) GiB", shown)[1]))
        assert ("each shared by 2 ranks (Ulysses)" in shown) == (size == 2)
        assert ("what ranks exchange to share sequences" in shown) == (size == 2)
    assert needed[1] == pytest.approx(needed[0], rel=0.1)  # the same tokens a rank


def test_experts_that_are_divided_leave_less_to_gather(capsys):
    words = (
        "+recipe=hybrid_1f3s model=hybrid2b model.num_layers=2 parallel=fsdp_bf16 launch.nproc=8"
    )
    sizes = "launch.device=h200 data.sequence_length=4096 trainer.batch_size=8"
    shown = [dry_run(f"{words} {sizes} parallel.experts={n}", capsys) for n in (1, 8)]
    gathered, sent = ([float(re.search(rf"([\d.]+) {what}", text)[1]) for text in shown]
                      for what in ("gathered", "GB from each rank"))  # fmt: skip
    assert gathered[1] < 0.8 * gathered[0]
    assert sent[1] < 0.7 * sent[0]
    assert "experts divided by 8: ranks 0-7; each sharded over 1" in shown[1]
    assert "GB of rows to experts and back" in shown[1]
    parameters = [re.search(r"parameters +.*", text)[0].rstrip() for text in shown]
    assert parameters[0] == parameters[1]


def test_experts_that_nobody_can_divide_are_refused(capsys):
    for words, remedy in (
        ("+recipe=tiny", "task pretrain has no layers with experts .* set parallel.experts=1"),
        ("+recipe=hybrid_1f3s", "must divide the 8 experts .* set parallel.experts to 1 or 2 or 4"),
    ):
        words = (
            f"{words} launch.nproc=4 parallel.experts=3 trainer.dry_run=true data.files=[text.txt]"
        )
        assert run(words.split()) == 2
        assert re.search(remedy, capsys.readouterr().err)


def test_a_device_nobody_knows(capsys):
    assert (
        run(["trainer.dry_run=true", "launch.device=tpu", "data=text", "data.files=[text.txt]"])
        == 2
    )
    assert "launch.device=tpu is not known" in capsys.readouterr().err
