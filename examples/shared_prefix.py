"""Pin a few-shot prefix: its KV blocks are computed once and reused by every request."""

from octavo import LLM, SamplingParams

EXAMPLES = """Translate English to German.
The dog sleeps under the table. => Der Hund schläft unter dem Tisch.
We have bought a new lamp. => Wir haben eine neue Lampe gekauft.
Why did the thief run into the forest? => Warum lief der Dieb in den Wald?
The teacher helps the children every day. => Der Lehrer hilft jeden Tag den Kindern.
"""
SENTENCES = [
    "The baker gives the small bird fresh bread.",
    "Paul hopes that his sister comes to the station.",
    "The doctor does not need a key.",
]


def main() -> None:
    llm = LLM("demo")
    llm.pin_prefix(EXAMPLES)
    prompts = [f"{EXAMPLES}{sentence} =>" for sentence in SENTENCES]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
    for sentence, output in zip(SENTENCES, outputs, strict=True):
        print(f"{sentence} =>{output.outputs[0].text}")
        print(f"  {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were cached")


if __name__ == "__main__":
    main()
