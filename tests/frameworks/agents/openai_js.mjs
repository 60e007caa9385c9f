// OpenAI's client for JavaScript: a chat with a forced tool, a streamed response, a typed one.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { done, model, question } from "./common.mjs";

const client = new OpenAI();
const Verdict = z.object({ even: z.enum(["yes", "no"]) });
const parameters = { type: "object", properties: { even: { enum: ["yes", "no"] } }, required: ["even"], additionalProperties: false };
const messages = [{ role: "user", content: question }];
const tools = [{ type: "function", function: { name: "answer", parameters } }];
const first = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
const [call] = first.choices[0].message.tool_calls;
const stream = await client.responses.create({ model, input: question, max_output_tokens: 8, stream: true });
let words = "";
for await (const event of stream) if (event.type === "response.output_text.delta") words += event.delta;
const typed = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Verdict, "verdict") });
done([call.function.arguments, words, typed.choices[0].message.parsed.even]);
