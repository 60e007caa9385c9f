// Anthropic's client for JavaScript: a forced tool and its result, streamed.
import Anthropic from "@anthropic-ai/sdk";
import { done, question } from "./common.mjs";

const client = new Anthropic();
const model = process.env.ANTHROPIC_MODEL;
const input_schema = { type: "object", properties: { even: { enum: ["yes", "no"] } }, required: ["even"], additionalProperties: false };
const tools = [{ name: "answer", input_schema }];
const messages = [{ role: "user", content: question }];
const first = await client.messages.create({ model, max_tokens: 120, messages, tools, tool_choice: { type: "any" } });
const [use] = first.content;
messages.push({ role: "assistant", content: first.content });
messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "noted" }] });
const stream = client.messages.stream({ model, max_tokens: 16, messages, tools });
const second = await stream.finalMessage();
done([use.input, second.stop_reason, second.content.map((block) => block.type)]);
