// The official OpenAI client for Node: plain, streamed, and through its `.stream()` helper.
//
// What to look at: each way of asking gives the same words, usage and finish reason.
//
//     npm install openai && node openai_sdk.mjs [base-url] [model]

import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const [baseURL = "http://127.0.0.1:8000/v1", model = "smollm2"] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused" });
const chat = {
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  max_tokens: 32,
};
const streamOptions = { stream_options: { include_usage: true } };

function report(way, text, usage, finish, pieces) {
  assert(text && usage && finish, `${way}: text, usage or finish reason is missing`);
  const counts = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];
  console.log(`  ${way}: ${JSON.stringify(text)}, pieces ${pieces}, usage ${counts}, finish ${finish}`);
  return [text, counts, finish];
}

const models = (await client.models.list()).data.map(({ id }) => id);
console.log(`openai ${VERSION} (Node ${process.version}), ${baseURL}, models: ${models}`);

const answer = await client.chat.completions.create(chat);
const plain = report("chat", answer.choices[0].message.content, answer.usage, answer.choices[0].finish_reason, 1);

const pieces = [];
let usage, finish;
for await (const chunk of await client.chat.completions.create({ ...chat, ...streamOptions, stream: true })) {
  if (chunk.choices[0]?.delta.content) pieces.push(chunk.choices[0].delta.content);
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
assert.deepEqual(report("chat, stream", pieces.join(""), usage, finish, pieces.length), plain);

const deltas = [];
const helper = client.chat.completions.stream({ ...chat, ...streamOptions }).on("content", (delta) => deltas.push(delta));
const final = await helper.finalChatCompletion();
const choice = final.choices[0];
const streamed = report("chat, .stream() helper", choice.message.content, final.usage, choice.finish_reason, deltas.length);
assert.deepEqual(streamed, plain);
assert.equal(deltas.join(""), plain[0]);
