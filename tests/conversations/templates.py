"""Public chat templates, written again, and references that render them without Jinja.

A reference returns pieces of text, each with whether it counts. The templates follow the structure
of the published ones. `tagged` has the same template with generation blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Pieces = list[tuple[str, bool]]
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
)


@dataclass(frozen=True)
class Case:
    """A template with what it needs, and its reference."""

    source: str
    reference: Callable[[Sequence[dict[str, Any]]], Pieces]
    eos: str
    bos: str = "<s>"
    specials: tuple[str, ...] = SPECIALS
    tagged: str | None = None
    has_system: bool = True
    alternates: bool = False


def make_simple(
    turn: Callable[[str, str], tuple[str, str, str]], begin: str = ""
) -> Callable[[Sequence[dict[str, Any]]], Pieces]:
    """Return the reference of a template that writes each message alone.

    Args:
        turn: Role and content -> what stands before, what the model writes, and what follows.
        begin: The beginning of the text.
    """

    def reference(messages: Sequence[dict[str, Any]]) -> Pieces:
        pieces: Pieces = [(begin, False)]
        for message in messages:
            before, written, after = turn(message["role"], message["content"])
            pieces += [(before, False), (written, message["role"] == "assistant"), (after, False)]
        return pieces

    return reference


def zephyr_turn(role: str, content: str) -> tuple[str, str, str]:
    return f"<|{role}|>\n", f"{content}</s>", "\n"


def olmo(messages: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = [("<|endoftext|>", False)]
    for number, message in enumerate(messages):
        pieces.append((f"<|{message['role']}|>\n", False))
        if message["role"] == "assistant":
            pieces.append((message["content"] + "<|endoftext|>", True))
            pieces.append(("" if number == len(messages) - 1 else "\n", False))
        else:
            pieces.append((message["content"] + "\n", False))
    return pieces


def mistral(messages: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    for message in messages:
        if message["role"] == "user":
            pieces += [(f"[INST] {message['content']} [/INST]", False), (" ", False)]
        else:
            pieces.append((message["content"] + "</s>", True))
    # The space before an answer stands before what counts.
    return pieces if messages[-1]["role"] == "assistant" else pieces[:-1]


def split_thought(message: dict[str, Any]) -> tuple[str, str]:
    """Return thought and answer of a message."""
    content = message["content"]
    if isinstance(message.get("reasoning_content"), str):
        return message["reasoning_content"], content
    if "</think>" not in content:
        return "", content
    thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return thought, content.split("</think>")[-1].lstrip("\n")


def qwen3(messages: Sequence[dict[str, Any]]) -> Pieces:
    questions = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "user" and not message["content"].startswith("<tool_response>")
    ]
    pieces: Pieces = []
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            first = number == 0 or messages[number - 1]["role"] != "tool"
            last = number == len(messages) - 1 or messages[number + 1]["role"] != "tool"
            text = "<|im_start|>user" if first else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            pieces.append((text + ("<|im_end|>\n" if last else ""), False))
            continue
        if role != "assistant":
            pieces.append((f"<|im_start|>{role}\n{message['content']}<|im_end|>\n", False))
            continue
        thought, answer = split_thought(message)
        written = answer
        after_question = number > (questions[-1] if questions else len(messages) - 1)
        if after_question and (number == len(messages) - 1 or thought):
            stripped = thought.strip("\n")
            written = f"<think>\n{stripped}\n</think>\n\n" + answer.lstrip("\n")
        for place, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            written += "\n" * bool(place or answer)
            written += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
            written += f"{function['arguments']}}}\n</tool_call>"
        pieces += [
            ("<|im_start|>assistant\n", False),
            (written + "<|im_end|>", True),
            ("\n", False),
        ]
    return pieces


def deepseek(messages: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = [("<｜begin▁of▁sentence｜>", False)]
    for message in messages:
        if message["role"] == "system":
            pieces.insert(1, (message["content"], False))
        elif message["role"] == "user":
            pieces.append((f"<｜User｜>{message['content']}", False))
        else:
            pieces.append(("<｜Assistant｜>", False))
            answer = message["content"].split("</think>")[-1]
            pieces.append((answer + "<｜end▁of▁sentence｜>", True))
    return pieces


def phi(messages: Sequence[dict[str, Any]]) -> Pieces:
    turns = make_simple(lambda role, content: (f"<|{role}|>\n", f"{content}<|end|>", "\n"))
    return [*turns(messages), ("<|endoftext|>", False)]


CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n'}}BEGIN{{ m['content'] + "
    "'<|im_end|>' }}END{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}BEGIN"
    "{{ m['content'] | trim + '<|eot_id|>' }}END{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' }}BEGIN{{ message['content'] + eos_token }}END{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' }}BEGIN"
    "{{ message['content'] | trim + '<end_of_turn>' }}END{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}BEGIN"
    "{{ message['content'] + eos_token }}END{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}BEGIN"
    "{{ message['content'] + '<|end|>' }}END{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GRANITE = (
    "{%- for message in messages %}\n"
    "    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}BEGIN"
    "{{- message['content'] + '<|end_of_text|>' }}END{{- '\\n' }}\n"
    "    {%- if loop.last and add_generation_prompt %}\n"
    "        {{- '<|start_of_role|>assistant<|end_of_role|>' }}\n    {%- endif %}\n{%- endfor %}"
)
OLMO = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\\n' }}BEGIN{{ message['content'] + eos_token }}END"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% set ns = namespace(system='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}"
    "{%- endfor %}{{bos_token}}{{ns.system}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>'}}BEGIN{{ content + '<｜end▁of▁sentence｜>'}}END{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
QWEN3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}BEGIN
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- content }}
            {%- endif %}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}END
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()  # noqa: E501


def build(text: str, role: str = "message['role']", **more: Any) -> Case:
    """Return a case of a template with BEGIN and END around what the model writes.

    Args:
        text: The template.
        role: Its expression for the role. Only an assistant's message is a generation block.
    """
    tagged = text.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
    plain = text.replace("BEGIN", "").replace("END", "")
    return Case(plain, tagged=tagged if role == "always" else None, **more)


CASES = {
    "chatml": build(
        CHATML,
        reference=make_simple(lambda role, c: (f"<|im_start|>{role}\n", f"{c}<|im_end|>", "\n")),
        eos="<|im_end|>",
    ),
    "llama3": build(
        LLAMA3,
        reference=make_simple(
            lambda role, c: (
                f"<|start_header_id|>{role}<|end_header_id|>\n\n",
                f"{c.strip()}<|eot_id|>",
                "",
            ),
            "<|begin_of_text|>",
        ),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": build(
        MISTRAL, "always", reference=mistral, eos="</s>", has_system=False, alternates=True
    ),
    "gemma": build(
        GEMMA,
        reference=make_simple(
            lambda role, c: (
                f"<start_of_turn>{'model' if role == 'assistant' else role}\n",
                f"{c.strip()}<end_of_turn>",
                "\n",
            ),
            "<bos>",
        ),
        eos="<eos>",
        bos="<bos>",
        has_system=False,
        alternates=True,
    ),
    "qwen3": build(QWEN3, "always", reference=qwen3, eos="<|im_end|>"),
    "deepseek": build(
        DEEPSEEK,
        "always",
        reference=deepseek,
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    # The names of roles are ordinary text in these two.
    "zephyr": build(
        ZEPHYR, reference=make_simple(zephyr_turn), eos="</s>", specials=("<s>", "</s>")
    ),
    "olmo": build(
        OLMO,
        "always",
        reference=olmo,
        eos="<|endoftext|>",
        bos="<|endoftext|>",
        specials=("<|endoftext|>",),
    ),
    "phi": build(PHI, reference=phi, eos="<|endoftext|>"),
    "granite": build(
        GRANITE,
        reference=make_simple(
            lambda role, c: (f"<|start_of_role|>{role}<|end_of_role|>", f"{c}<|end_of_text|>", "\n")
        ),
        eos="<|end_of_text|>",
    ),
}
"""Name -> a public template."""
