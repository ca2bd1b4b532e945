// OpenAI's client for node: lists, completions, streams, chats, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const prompt = "Once upon a time there was a";

const models = await client.models.list();
assert.deepEqual(models.data.map((each) => each.id), ["demo"]);

const whole = await client.completions.create({
  model: "demo", prompt: [prompt, "The cat"], max_tokens: 12, temperature: 0, logprobs: 2, echo: true,
});
assert.equal(whole.choices.length, 2);
assert.ok(whole.choices[0].text.startsWith(prompt));
assert.equal(whole.choices[0].logprobs.token_logprobs[0], null);
assert.ok(whole.usage.prompt_tokens_details.cached_tokens >= 0);

const stream = await client.completions.create({
  model: "demo", prompt, max_tokens: 12, temperature: 0, stream: true, stream_options: { include_usage: true },
});
let text = "";
let usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.text ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(prompt + text, whole.choices[0].text);
assert.equal(usage.completion_tokens, 12);

const messages = [{ role: "user", content: "What is a cat?" }];
const chat = await client.chat.completions.create({
  model: "demo", messages, max_completion_tokens: 12, temperature: 0, n: 1, logprobs: true, top_logprobs: 2,
});
assert.equal(chat.choices[0].logprobs.content[0].top_logprobs.length, 2);
const runner = client.chat.completions.stream({
  model: "demo", messages, max_completion_tokens: 12, temperature: 0,
});
assert.equal(await runner.finalContent(), chat.choices[0].message.content);

await assert.rejects(
  client.completions.create({ model: "demo", prompt, temperature: 5 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  client.completions.create({ model: "none", prompt }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
const aborted = await client.completions.create({ model: "demo", prompt, max_tokens: 500, stream: true });
for await (const chunk of aborted) {
  assert.ok(chunk.id);
  break;
}
console.log("models, completions, streams, chats, errors, an abandoned stream");
