"""Text for small corpora."""


def made_text(seed: int, words: int) -> str:
    """Some text that differs from seed to seed and has words to merge."""
    vocabulary = ["attention", "index", "token", "über", "稀疏", "x=1\n", "\tdef", "0123", "🙂"]
    state = seed + 1
    out = []
    for _ in range(words):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        out.append(vocabulary[(state >> 8) % len(vocabulary)])
    return f"# {seed}\n" + " ".join(out)
