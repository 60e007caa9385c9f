// The Vercel AI SDK: a text with a tool that must be called, in steps, and an object, by its default API.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { done, model, question } from "./common.mjs";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const note = tool({
  description: "Notes a word.",
  inputSchema: z.object({ word: z.enum(["odd", "even"]) }),
  execute: async ({ word }) => `noted ${word}`,
});
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
const called = await generateText({ model: openai(model), prompt: question, tools: { note }, stopWhen: stepCountIs(2), prepareStep });
const typed = await generateText({
  model: openai(model), prompt: question, output: Output.object({ schema: z.object({ even: z.enum(["yes", "no"]) }) }),
});
const stream = streamText({ model: openai(model), prompt: question, maxOutputTokens: 8 });
done([called.steps.length, called.text, typed.output.even, await stream.text]);
