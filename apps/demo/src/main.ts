import 'reflect-metadata';
import { constants } from 'node:os';
import { EmbeddedPostgresError } from '@leasehold/embedded-postgres';
import { DemoError, Interrupted } from './errors';
import { type DemoOptions, HELP, readOptions } from './options';
import { run } from './run/run';

/** How long open handles may keep the process after everything was closed. */
const LINGER_MS = 3000;

/** Aborts on Ctrl-C and its like; the second one ends at once (workers and server follow by themselves). */
function interruption(): AbortSignal {
  const controller = new AbortController();
  const interrupt = (exitCode: number): void => {
    if (controller.signal.aborted) process.exit(exitCode);
    controller.abort(new Interrupted(exitCode));
  };
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    process.on(signal, () => interrupt(128 + constants.signals[signal]));
  }
  // Whoever read our output is gone (`npm start | head`): nobody watches any more.
  for (const stream of [process.stdout, process.stderr]) stream.on('error', () => interrupt(1));
  return controller.signal;
}

async function main(): Promise<number> {
  const signal = interruption();
  try {
    const options: DemoOptions | 'help' = readOptions(process.argv.slice(2));
    if (options === 'help') {
      process.stdout.write(`${HELP}\n`);
      return 0;
    }
    return await run(options, signal);
  } catch (error) {
    return explain(signal.aborted ? signal.reason : error);
  }
}

/** @returns the exit code */
function explain(error: unknown): number {
  const expected = error instanceof DemoError || error instanceof EmbeddedPostgresError;
  const text = error instanceof Error ? (expected ? error.message : (error.stack ?? error.message)) : String(error);
  process.stderr.write(`${text}\n`);
  return error instanceof DemoError ? error.exitCode : 1;
}

void main().then((exitCode) => {
  process.exitCode = exitCode;
  setTimeout(() => process.exit(), LINGER_MS).unref();
});
