"""Texts on which tokenizer libraries tend to differ.

They have white space, contractions, combining characters, scripts without spaces, emoji, control
characters, special tokens and long repetitions.
"""

AWKWARD = (
    *("", " ", "   ", "\n", "\r\n\r\n  \t x", "a  b   c    d\n\n\ne ", " leading and trailing "),
    "don't we'll I'VE they're it's 'tis ''s",
    "naïve café Ünïcödé ﬁ ſ İstanbul e\u0301 \u00a0\u2003\u3000x\u200b\u2028y\x85z",
    "漢字かな交じり文 한국어 ไทย العربية हिन्दी עברית",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \U0010ffff\ufffd\ufeff",
    "0 00 123456789 1,234.56e-7 ½ ² Ⅷ ٣",
    "\x00\x01\x7f\x1b[0m",
    "<|endoftext|> a<|endoftext|>b <s></s>[CLS]",
    "a" * 3000,
    "=" * 500 + " " * 500 + "\t" * 70 + "!?" * 300,
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # \u2192 done\n",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org",
)
