"""Chat templates that others have written: limits of time, memory and output, and the process that renders them."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxlc.core.errors import UserError
from jaxlc.data.texts.chats import Chat
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.tokens import template_process
from jaxlc.data.tokens.chat import ChatTemplate
from jaxlc.data.tokens.named_templates import TEMPLATES

CHAT = [dict(role="user", content="q"), dict(role="assistant", content="a")]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
IF_LOOPS = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
IF_LOOPS += "{% endfor %}{% endif %}"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(template_process, "_CPU_SECONDS", 1.5)  # above what the other limits need on a slow machine
    monkeypatch.setattr(template_process, "_MAX_DATA_BYTES", 256 << 20)


def children() -> set[str]:
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    if not os.path.exists(path):
        pytest.skip("the kernel does not list child processes")
    with open(path) as file:
        return set(file.read().split())


@pytest.mark.parametrize(
    "source, message",
    [
        (IF_LOOPS.replace("loop", "q"), "needs more than 2 s of CPU time"),
        ("{{ messages[0].content * 100000000 }}", "more than 67,108,864 characters"),
        ("{% set x = messages * 1000000000 %}{{ x }}", "raises an error for the messages .MemoryError"),
        (
            "{% set n = namespace(x='a' * 1000000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "MemoryError",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        # Refused before they are rendered: the compiler computes constant expressions.
        ("{{ (1000000000000000000000 ** 100000) ** 1000 }}", "not a valid Jinja template: it needs more than"),
        ("{{ 'a' * 100000000 }}", "more than 67,108,864 characters|MemoryError|CPU time"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not a valid Jinja template"),
        ("{{ " + "1" * 5000 + " }}", "not a valid Jinja template"),
        ("{{ a }}" * 50_000, "more than 262,144 characters"),
    ],
)
def test_template_that_exceeds_a_limit_is_an_error(source, message):
    with pytest.raises(UserError, match=message):
        ChatTemplate(source, {}).render(Chat(CHAT), "f:1")


def test_process_that_hangs_is_replaced():
    template = ChatTemplate(IF_LOOPS + PLAIN, {})
    expected = template.render(Chat(CHAT), "f:1")
    assert expected.text == "user: q</s>assistant: a</s>"
    before = children()
    with pytest.raises(BadRecord, match="^f:2: the chat template needs more than"):
        template.render(Chat([dict(role="user", content="loop"), CHAT[1]]), "f:2")
    assert template.render(Chat(CHAT), "f:3") == expected
    assert len(children()) == len(before)
    del template
    assert len(children()) == len(before) - 1


def test_answer_of_an_abandoned_chat_is_not_that_of_the_next():
    """The first chat ends with an error after two of four renderings."""
    without_roles = PLAIN.replace("{{ m.role }}: ", "{{ m.role if messages | length < 4 }}: ")
    template = ChatTemplate("{% if messages | length == 4 %}x{% endif %}" + without_roles, {})
    with pytest.raises(BadRecord, match="renders a message differently") as raised:
        template.render(Chat(CHAT * 2), "f:1")
    assert template.render(Chat(CHAT), "f:2").text == "user: q</s>assistant: a</s>", raised


def test_chats_that_are_asked_together_equal_single_ones():
    """Also after one that ends the process, one with an error, one that is not asked, and one that is long."""
    contents = ["0", "loop", "2", "\ufdd0", "error", "5" * 40_000, "6"]
    chats = [(Chat([dict(role="user", content=x), CHAT[1]]), f"f:{i}") for i, x in enumerate(contents)]
    if_error = "{% if messages[0].content == 'error' %}{{ raise_exception('E') }}{% endif %}"
    template = ChatTemplate(IF_LOOPS + if_error + PLAIN, {})
    results = list(template.render_all(chats))
    texts = [getattr(result, "text", str(result)[:20]) for result in results]
    assert texts == [
        "user: 0</s>assistant: a</s>",
        "f:1: the chat templa",
        "user: 2</s>assistant: a</s>",
        "f:3: the messages co",
        "f:4: the chat templa",
        f"user: {contents[5]}</s>assistant: a</s>",
        "user: 6</s>assistant: a</s>",
    ]


def test_chats_that_were_asked_and_not_read_are_not_those_of_the_next():
    template = ChatTemplate(PLAIN, {})
    chats = [(Chat([dict(role="user", content=str(i)), CHAT[1]]), "f:1") for i in range(5)]
    results = template.render_all(chats)
    assert next(results).text.startswith("user: 0")
    results.close()
    assert template.render(Chat(CHAT), "f:2").text == "user: q</s>assistant: a</s>"
    assert [result.text[6] for result in template.render_all(chats)] == list("01234")


def test_text_of_the_process_equals_that_in_this_process():
    """Also with lone surrogates, all whitespace, and values that JSON lacks."""
    texts = ["\ud800 é 😀 \x00\x1f\u2028\r\n\t", '"\\ {}', "", " a "]
    chats = [[dict(role="user", content=text, number=float("nan")), CHAT[1]] for text in texts]
    source = TEMPLATES["chatml"]
    here, there = ChatTemplate(source, {}), ChatTemplate("{# #}" + source, {})
    tools = [{"name": "f", "é": [1, 2.5, None, {"a": "\ud800"}]}]
    for chat in chats:
        assert there.render(Chat(chat, tools), "f:1") == here.render(Chat(chat, tools), "f:1")
        assert there.prompt(chat) == here.prompt(chat)
    assert there.end_of_turn == here.end_of_turn == "<|im_end|>"


def test_threads_share_a_process():
    template = ChatTemplate(PLAIN, {})
    chats = [[dict(role="user", content=str(i)), CHAT[1]] for i in range(50)]
    with ThreadPoolExecutor(4) as executor:
        texts = list(executor.map(lambda chat: template.render(Chat(chat), "f:1").text, chats))
    assert texts == [f"user: {i}</s>assistant: a</s>" for i in range(50)]


def test_pickled_template_renders_the_same():
    template = ChatTemplate(PLAIN + "{{ eos_token }}", {"eos_token": "</e>"}, "T")
    expected = template.render(Chat(CHAT), "f:1")
    copy = pickle.loads(pickle.dumps(template))
    assert (copy.render(Chat(CHAT), "f:1"), copy.identity, copy.name) == (expected, template.identity, "T")


_PROGRAM = f"""
import os, sys
from jaxlc.data.texts.chats import Chat
from jaxlc.data.tokens.chat import ChatTemplate
template = ChatTemplate({PLAIN!r}, {{}})
text = template.render(Chat({CHAT!r}), "f:1").text
for _ in range(2):
    if not os.fork():
        assert template.render(Chat({CHAT!r}), "f:1").text == text
        sys.exit()  # runs the exit functions, which must not end the process of the parent
    assert os.wait()[1] == 0
process = template._process._child._process
assert template.render(Chat({CHAT!r}), "f:1").text == text and process is template._process._child._process
print(process.pid)
"""


@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_no_process_is_left_after_the_interpreter_ends(end):
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM + f"sys.stdout.flush()\n{end}"], capture_output=True, text=True
    )
    assert not run.stderr and run.returncode == 0
    subprocess.run(["timeout", "10", "tail", f"--pid={run.stdout.strip()}", "-f", "/dev/null"], check=True)
