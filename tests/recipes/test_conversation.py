import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.chat.conversation import COLUMNS, Conversation, read_conversation
from recipes.chat.questions import SYSTEM, read_docstrings
from recipes.text.rows import BadRows

SAID = [("user", "2+2?"), ("assistant", "4")]


def said(row):
    return [(m["role"], m["content"]) for m in read_conversation(row).messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"text": "2?"}]},
                      {"role": "assistant", "content": "4"}], "prompt": "not this"},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"role": "user", "content": "2+2?"}, {"role": "model", "content": "4"}]},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]},
        {"instruction": "2+2?", "output": "4"},
        {"instruction": "2+2?", "input": "", "output": "4", "text": "ignored"},
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_conversation(row):
    assert said(row) == SAID
    columns = dict.fromkeys(("messages", "conversations", "system", "prompt", "instruction"))
    assert said({**columns, **row}) == SAID  # as Parquet has it: columns without a value


def test_system_messages_inputs_and_further_turns():
    assert said({"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."}) == [
        ("system", "Be brief."), ("user", "Add.\n\n2, 2"), ("assistant", "4"),
    ]  # fmt: skip
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2
    row = {"system": "s", "conversations": turns}
    assert [role for role, _ in said(row)] == ["system", *["user", "assistant"] * 2]
    assert read_conversation(row).answers == [2, 4]


def test_tools_and_other_fields_reach_the_template():
    call = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    conversation = read_conversation(
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": None, "tool_calls": call},
                {"role": "function", "content": "4", "name": "add"},
                {"role": "assistant", "content": "4"},
            ],
            "tools": [{"name": "add"}],
        }
    )
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": call}
    assert conversation.messages[2] == {"role": "tool", "content": "4", "name": "add"}
    assert conversation.tools == [{"name": "add"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "none of messages, conversations, .* but nothing"),
        ({"text": "x"}, "none of messages, .* but 'text'"),
        ({"messages": []}, "without messages"),
        ({"messages": "hello"}, "messages is str, where a list is needed"),
        ({"messages": ["hello"]}, "a message that is str"),
        ({"messages": [{"content": "x"}]}, "a message without 'role'"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'; there are system"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is int, where text is needed"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is list"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
         "an empty text of assistant"),
        ({"conversations": [{"value": "x"}]}, "a message without 'from'"),
        ({"prompt": "x"}, "a prompt without a completion"),
        ({"prompt": 3, "completion": "x"}, "content is int"),
        ({"instruction": "x"}, "an instruction without an output"),
        ({"instruction": "x", "input": 3, "output": "y"}, "input is int"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_says_why(row, message):
    with pytest.raises(ValueError, match=message):
        read_conversation(row)


words = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3),
    st.sampled_from(["user", "gpt", "role", "content", "from", "value"]),
)  # fmt: skip
keys = st.sampled_from(["role", "content", "from", "value", "tool_calls", "text"])
anything = st.recursive(
    words, lambda more: st.lists(more, max_size=3) | st.dictionaries(keys, more, max_size=4)
)


@given(st.dictionaries(st.sampled_from(COLUMNS), anything, max_size=4))
def test_any_row_is_a_conversation_or_says_why_not(row):
    try:
        found = read_conversation(row)
    except ValueError:
        return
    assert isinstance(found, Conversation)
    assert found.answers
    assert all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in found.messages)


def test_questions_about_python_code(tmp_path):
    file = tmp_path / "shapes.py"
    file.write_text(
        'def area(a, b=1, *, round=False):\n    """Area of a rectangle.\n\n    More.\n      And more.\n    """\n\n'
        "def silent(): pass\n\n"
        'class Box:\n    """A box."""\n\n    def open(self):\n        """Opens."""\n'
    )
    rows = list(read_docstrings(file, [], BadRows(0)))
    assert [row.where for row in rows] == [f"{file}:1", f"{file}:10"]
    assert said(rows[0].value) == [
        ("system", SYSTEM),
        ("user", "What does shapes.area(a, b=1, *, round=False) do?"),
        ("assistant", "Area of a rectangle.\n\nMore.\n  And more."),
    ]
    assert said(rows[1].value)[1:] == [
        ("user", "What is the class shapes.Box?"), ("assistant", "A box."),
        ("user", "And its method open(self)?"), ("assistant", "Opens."),
    ]  # fmt: skip
    file.write_text("def (:")
    bad = BadRows(1)
    assert list(read_docstrings(file, [], bad)) == []
    assert bad.first[0].startswith(f"{file}:1: not Python")
