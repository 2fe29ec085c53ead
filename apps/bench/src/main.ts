import { constants } from 'node:os';
import { EmbeddedPostgresError } from '@leasehold/embedded-postgres';
import { type BenchOptions, HELP, readOptions } from './cli';
import { BenchError, Interrupted } from './errors';
import { DOCS_FOLDER } from './paths';
import { run } from './run';
import { tableOf } from './report/table';
import { readResults, withFormerCases, writeDocument } from './report/document';

/** How long open handles may keep the process after everything was closed. */
const LINGER_MS = 3000;

/** Aborts on Ctrl-C and its like; the second one ends at once (agents and servers follow by themselves). */
function interruption(): AbortSignal {
  const controller = new AbortController();
  const interrupt = (exitCode: number): void => {
    if (controller.signal.aborted) process.exit(exitCode);
    controller.abort(new Interrupted(exitCode));
  };
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    process.on(signal, () => interrupt(128 + constants.signals[signal]));
  }
  for (const stream of [process.stdout, process.stderr]) stream.on('error', () => interrupt(1));
  return controller.signal;
}

async function main(args: string[]): Promise<number> {
  const signal = interruption();
  try {
    const options = readOptions(args);
    if (options === 'help') {
      process.stdout.write(`${HELP}\n`);
      return 0;
    }
    await obey(options, args, signal);
    return 0;
  } catch (error) {
    return explain(signal.aborted ? signal.reason : error);
  }
}

async function obey(options: BenchOptions, args: string[], signal: AbortSignal): Promise<void> {
  const say = (text: string): void => void process.stderr.write(`${text}\n`);
  if (options.from !== undefined) {
    say(`written: ${writeDocument(readResults(options.from), DOCS_FOLDER).join(', ')}`);
    return;
  }
  const command = ['npm run bench', ...(args.length > 0 ? ['--', ...args] : [])].join(' ');
  const results = await run(options, command, signal, {
    say,
    result: (result) => {
      if (options.json) process.stdout.write(`${JSON.stringify(result)}\n`);
    },
  });
  if (!options.json) process.stdout.write(`\n${tableOf(results)}\n`);
  if (options.write) say(`written: ${writeDocument(withFormerCases(results, DOCS_FOLDER), DOCS_FOLDER).join(', ')}`);
}

/** @returns the exit code */
function explain(error: unknown): number {
  const expected = error instanceof BenchError || error instanceof EmbeddedPostgresError;
  const text = error instanceof Error ? (expected ? error.message : (error.stack ?? error.message)) : String(error);
  process.stderr.write(`${text}\n`);
  return error instanceof BenchError ? error.exitCode : 1;
}

void main(process.argv.slice(2)).then((exitCode) => {
  process.exitCode = exitCode;
  setTimeout(() => process.exit(), LINGER_MS).unref();
});
