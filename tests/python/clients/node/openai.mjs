// OpenAI's Node client against a running server: node openai.mjs CHECK URL KEY MODEL

import assert from "node:assert/strict";
import OpenAI from "openai";

const [check, baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const greedy = { model, temperature: 0 };
const question = [{ role: "user", content: "What is the capital of France?" }];
const parameters = {
  type: "object",
  properties: {
    city: { enum: ["Paris", "Berlin"] },
    degrees: { type: "integer", minimum: -40, maximum: 50 },
  },
  required: ["city", "degrees"],
  additionalProperties: false,
};
const report = [{ role: "user", content: "It is 21 degrees in Paris. Report it." }];

function assertReading(text) {
  const { city, degrees } = JSON.parse(text);
  assert.ok(["Paris", "Berlin"].includes(city));
  assert.ok(Number.isInteger(degrees) && degrees >= -40 && degrees <= 50);
}

const checks = {
  async chat() {
    const asked = { ...greedy, messages: question, max_tokens: 24 };
    const whole = await client.chat.completions.create(asked);
    const text = whole.choices[0].message.content;
    assert.match(text, /Paris/);
    let streamed = "";
    let usage = null;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
      streamed += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(streamed, text);
    assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
    const helper = client.chat.completions.stream(asked);
    assert.equal(await helper.finalContent(), text);
  },

  async tools() {
    const tool = { type: "function", function: { name: "report", parameters, strict: true } };
    const asked = {
      ...greedy,
      messages: report,
      tools: [tool],
      tool_choice: "required",
      parallel_tool_calls: false,
    };
    const whole = await client.chat.completions.create(asked);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(call.function.name, "report");
    assertReading(call.function.arguments);
    let pieces = 0;
    const helper = client.chat.completions
      .stream(asked)
      .on("tool_calls.function.arguments.delta", () => (pieces += 1));
    const [streamed] = (await helper.finalMessage()).tool_calls;
    assert.equal(streamed.function.name, "report");
    assert.equal(streamed.function.arguments, call.function.arguments);
    assert.ok(pieces > 1, `${pieces} pieces`);
    const answer = await client.chat.completions.create({
      ...asked,
      messages: [
        ...report,
        whole.choices[0].message,
        { role: "tool", tool_call_id: call.id, content: "written down" },
      ],
      tool_choice: "none",
      max_tokens: 8,
    });
    assert.ok(answer.choices[0].message.content);
  },

  async schema() {
    const whole = await client.chat.completions.create({
      ...greedy,
      messages: report,
      response_format: {
        type: "json_schema",
        json_schema: { name: "reading", schema: parameters, strict: true },
      },
    });
    assertReading(whole.choices[0].message.content);
  },

  async responses() {
    const asked = { ...greedy, input: question, max_output_tokens: 24 };
    const whole = await client.responses.create(asked);
    assert.match(whole.output_text, /Paris/);
    let text = "";
    const kinds = [];
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    assert.equal(kinds[0], "response.created");
    assert.equal(kinds.at(-1), `response.${whole.status}`);
    const helper = client.responses.stream({
      ...greedy,
      input: report,
      tools: [{ type: "function", name: "report", parameters, strict: true }],
      tool_choice: "required",
    });
    const call = (await helper.finalResponse()).output.at(-1);
    assert.equal(call.type, "function_call");
    const calls = (await client.responses.create({
      ...greedy,
      input: [
        ...report,
        call,
        { type: "function_call_output", call_id: call.call_id, output: "written down" },
      ],
      max_output_tokens: 8,
    })).output;
    assert.equal(calls.at(-1).type, "message");
    assertReading(call.arguments);
  },

  async embeddings() {
    const input = ["A cat sleeps.", "A kitten naps."];
    const answer = await client.embeddings.create({ model, input }); // in base64
    const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
    assert.equal(answer.data.length, 2);
    for (const [index, { embedding }] of answer.data.entries()) {
      assert.equal(embedding.length, plain.data[index].embedding.length);
      for (const [at, value] of embedding.entries()) {
        assert.ok(Math.abs(value - plain.data[index].embedding[at]) < 1e-6);
      }
    }
  },

  async errors() {
    const ask = (fields) => client.chat.completions.create({ ...greedy, messages: question, ...fields });
    await assert.rejects(ask({ temperature: 9 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
    await assert.rejects(ask({ model: "gpt-9" }), OpenAI.NotFoundError);
    const stranger = client.withOptions({ apiKey: "wrong" });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    assert.deepEqual(ids, [model]);
  },

  async abort() {
    const stream = await client.chat.completions.create({
      ...greedy,
      messages: question,
      max_tokens: 1500,
      ignore_eos: true,
      stream: true,
    });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) break; // ends the connection
    }
  },
};

await checks[check]();
console.log("ok");
