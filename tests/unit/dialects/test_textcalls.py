"""Tool calls that came as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.dialects.textcalls import MAX_TEXT, find_call

TOOL = "get_weather"
ARGS = '{"city": "Paris"}'


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("Hermes (Qwen), <tool_call>", f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>'),
        ("Hermes (Qwen), <tool_call>", f'Sure!\n<tool_call>{{"arguments": {ARGS}, "name": "get_weather"}}'),
        ("XML (Qwen3-Coder, Llama), <function=", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"),
        ("XML (Qwen3-Coder, Llama), <function=", f"<function=get_weather>{ARGS}</function>"),
        ("XML (MiniMax), <invoke", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'),
        ("GLM's <tool_call> with <arg_key>", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris"),
        ("JSON", f'{{"name": "get_weather", "parameters": {ARGS}}}'),
        ("JSON", f'Here you are:\n```json\n[{{"name": "get_weather", "arguments": {ARGS}}}]\n```'),
        ("JSON", f'{{"type": "function", "function": {{"name": "get_weather", "arguments": {ARGS}}}}}'),
        ("JSON", f'Action:\n```json\n[{{"tool_name": "get_weather", "parameters": {ARGS}}}]\n```'),
        ("JSON", f'{{"parameters": {ARGS}, "name": "get_weather"}}'),
        ("JSON", '{"name": "get_weather", "arguments": {"city": "Par'),
        ("Llama's <|python_tag|>", '<|python_tag|>get_weather.call(city="Paris")'),
        ("Llama's <|python_tag|>", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}'),
        ("Mistral's [TOOL_CALLS]", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}]'),
        ("Mistral's [TOOL_CALLS]", f"[TOOL_CALLS]get_weather[ARGS]{ARGS}"),
        (
            "DeepSeek's <｜tool▁call▁begin｜>",
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGS}\n```",
        ),
        ("DSML (DeepSeek 3.2)", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">'),
        (
            "Kimi's <|tool_call_begin|>",
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGS}",
        ),
        (
            "harmony (gpt-oss), to=functions",
            f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGS}",
        ),
        ("<|tool_call|> (Granite, Phi)", f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGS}}}]'),
        ("InternLM's <|action_start|>", f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ARGS}}}'),
        ("Functionary's >>>", f">>>get_weather\n{ARGS}"),
        ("a call in Python", '[get_weather(city="Paris")]'),
        ("a call in Python", 'get_weather("Paris")'),
        ("a call in Python", '```tool_code\nprint(get_weather(city="Paris"))\n```'),
        ("a call in Python", 'I will look.\n```python\nget_weather(city="Paris")\n```'),
    ],
)
def test_a_call_is_known_by_its_notation(notation: str, text: str) -> None:
    assert find_call(text, TOOL) == notation


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The weather in Paris is mild.",
        "I can't call get_weather here.",
        'To find out, call get_weather(city) or get_weather(city="Paris") yourself.',
        'You could use the tool "get_weather" with the argument "city".',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '{"name": "get_weather"}',
        '```json\n{"type": "function", "parameters": {"city": "Paris"}}\n```',
        "<function=get_weather_report>",
    ],
)
def test_a_mention_is_no_call(text: str) -> None:
    assert find_call(text, TOOL) is None


def test_a_call_behind_more_text_than_anybody_reads_is_not_looked_for() -> None:
    call = '<tool_call>{"name": "get_weather"}'
    assert find_call(" " * (MAX_TEXT - len(call)) + call, TOOL) is not None
    assert find_call(" " * MAX_TEXT + call, TOOL) is None


PIECES = st.sampled_from(
    [
        "get_weather",
        "<tool_call>",
        "[TOOL_CALLS]",
        '"name": "',
        '"arguments": ',
        "```",
        "<|python_tag|>",
        "{",
        "\n",
        "(",
    ]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=200).map("".join)))
def test_any_text_is_read_to_an_end(text: str) -> None:
    assert find_call(text, TOOL) is None or "get_weather" in text
