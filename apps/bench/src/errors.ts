/** An end whose message says it all: no stack is shown. */
export class BenchError extends Error {
  readonly exitCode: number = 1;
}

/** A command line that cannot be followed: the message names the flag and what is allowed. */
export class UsageError extends BenchError {
  override readonly exitCode = 2;
}

/** The end that a signal asked for. */
export class Interrupted extends BenchError {
  constructor(override readonly exitCode: number) {
    super('Interrupted: everything was shut down');
  }
}

export const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));
