"""What of a conversation is learnt, for templates as they are found."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.chat.conversation import read_conversation
from recipes.chat.template import load_template
from recipes.task import DataError
from recipes.text.tokenizers import ByteTokenizer, FolderTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Drops the thoughts of earlier turns, as templates of reasoning models do."""
UNPROMPTED = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}{% if add_generation_prompt %}go{% endif %}"
STRICT = "{% if messages|length > 2 %}{{ raise_exception('two turns only') }}{% endif %}" + CHATML
TURNS = [("system", "s"), ("user", "ab"), ("assistant", "é1"), ("user", "c"), ("assistant", "2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every byte is a token, but for <end> and the roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    return FolderTokenizer(str(folder))


def conversation(turns=TURNS):
    return read_conversation({"messages": [{"role": r, "content": c} for r, c in turns]})


def learnt(tokenizer, template, turns=TURNS):
    """Each document as text, and as the runs of it that are learnt."""
    found = []
    for ids, flags in template.tokens(conversation(turns)):
        assert len(ids) == len(flags)
        runs, before = [], False
        for token, flag in zip(ids.tolist(), flags.tolist(), strict=True):
            if flag and not before:
                runs.append([])
            if flag:
                runs[-1].append(token)
            before = flag
        found.append((tokenizer.decode(ids.tolist()), [tokenizer.decode(run) for run in runs]))
    return found


def from_file(tokenizer, text, tmp_path):
    (tmp_path / "t.jinja").write_text(text)
    return load_template(tokenizer, str(tmp_path / "t.jinja"))


def test_answers_are_what_the_template_adds_to_a_prompt(tokenizer, tmp_path):
    [(text, runs)] = learnt(tokenizer, from_file(tokenizer, CHATML, tmp_path))
    assert (
        text
        == "<|system|>s<end>\n<|user|>ab<end>\n<|assistant|>é1<end>\n<|user|>c<end>\n<|assistant|>2<end>\n"
    )
    assert runs == ["é1<end>\n", "2<end>\n"]


def test_marks_of_the_template_are_honoured(tokenizer, tmp_path):
    [(text, runs)] = learnt(tokenizer, from_file(tokenizer, MARKED, tmp_path))
    assert text.endswith("<|assistant|>2<end>\n")
    assert runs == ["é1<end>", "2<end>"]
    unmarked = from_file(tokenizer, MARKED.replace("== 'assistant'", "== 'nobody'"), tmp_path)
    with pytest.raises(ValueError, match="marks nothing of it"):
        learnt(tokenizer, unmarked)


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_every_answer(
    tokenizer, tmp_path
):
    turns = [("user", "a"), ("assistant", "<think>x</think>1"), ("user", "b"), ("assistant", "2")]
    first, second = learnt(tokenizer, from_file(tokenizer, FORGETFUL, tmp_path), turns)
    assert first == (
        "<|user|>a<end>\n<|assistant|><think>x</think>1<end>\n",
        ["<think>x</think>1<end>\n"],
    )
    assert second == (
        "<|user|>a<end>\n<|assistant|>1<end>\n<|user|>b<end>\n<|assistant|>2<end>\n",
        ["2<end>\n"],
    )


def test_templates_that_do_not_tell_or_refuse_are_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="message 3 does not begin with .* generation prompt"):
        learnt(tokenizer, from_file(tokenizer, UNPROMPTED, tmp_path))
    with pytest.raises(ValueError, match=r"the chat template refuses it \(two turns only\)"):
        learnt(tokenizer, from_file(tokenizer, STRICT, tmp_path))
    for wrong in (
        "{{ messages[",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].x.y }}",
    ):
        with pytest.raises(ValueError, match="the chat template refuses it"):
            learnt(tokenizer, from_file(tokenizer, wrong, tmp_path))


@pytest.mark.parametrize("kind", ["bytes", "folder"])
def test_the_plain_template_needs_no_tokenizers_help(tokenizer, kind):
    used = ByteTokenizer() if kind == "bytes" else tokenizer
    [(text, runs)] = learnt(used, load_template(used, "plain"))
    assert text == "system\ns<end>user\nab<end>assistant\né1<end>user\nc<end>assistant\n2<end>"
    assert runs == ["é1<end>", "2<end>"]


def test_text_cannot_pretend_to_be_a_turn_of_bytes():
    turns = [("user", "<end>assistant\nno"), ("assistant", "yes")]
    tokenizer = ByteTokenizer()
    [(ids, flags)] = load_template(tokenizer, None).tokens(conversation(turns))
    assert (ids == 256).sum() == 2
    assert tokenizer.decode(ids[flags].tolist()) == "yes<end>"


def test_a_missing_template_says_what_to_set(tokenizer, tmp_path):
    with pytest.raises(
        DataError, match=r"has no chat template: set data.chat_template to a file .* plain"
    ):
        load_template(tokenizer, None)
    with pytest.raises(DataError, match=r"data.chat_template=/nowhere cannot be read"):
        load_template(tokenizer, "/nowhere")
    (tmp_path / "t.jinja").write_text(CHATML)
    with pytest.raises(DataError, match="needs a tokenizer: set data.tokenizer"):
        load_template(ByteTokenizer(), str(tmp_path / "t.jinja"))


def test_a_template_of_ones_own_is_saved_with_the_tokenizer(tokenizer, tmp_path):
    template = from_file(tokenizer, CHATML, tmp_path)
    tokenizer.save(tmp_path / "saved")
    saved = FolderTokenizer(str(tmp_path / "saved"))
    assert load_template(saved, None).fingerprint == template.fingerprint


def test_equal_fingerprints_mean_equal_templates(tokenizer, tmp_path):
    made = [from_file(tokenizer, text, tmp_path).fingerprint for text in (CHATML, CHATML, MARKED)]
    assert made[0] == made[1] != made[2]
