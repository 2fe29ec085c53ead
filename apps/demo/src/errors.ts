/** An end whose message says it all: no stack is shown. */
export class DemoError extends Error {
  readonly exitCode: number = 1;
}

/** A command line that cannot be followed, or a folder that cannot be used: the message says what to change. */
export class UsageError extends DemoError {
  override readonly exitCode = 2;
}

/** The end that a signal asked for. */
export class Interrupted extends DemoError {
  constructor(override readonly exitCode: number) {
    super('Interrupted: everything was shut down');
  }
}
