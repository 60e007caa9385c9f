// What the agents of these tests share: their task comes on stdin, their reward leaves on stdout.
import { readFileSync } from "node:fs";

export const task = JSON.parse(readFileSync(0, "utf8"));
export const question = `Is ${task.task_index} even? Say yes or no.`;
export const model = process.env.OPENAI_MODEL;

export function done(said) {
  const text = JSON.stringify(said);
  const sum = [...text].reduce((total, one) => total + one.codePointAt(0), 0);
  console.log(JSON.stringify({ reward: (sum % 17) / 16, response: text.slice(0, 1000).toWellFormed?.() ?? text.slice(0, 1000) }));
}
