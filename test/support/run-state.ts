import type { TestServer } from './test-server';

/** What global setup leaves for global teardown and the reporter; all three live in jest's parent process. */
export interface RunState {
  server?: TestServer;
  teardownFailed?: boolean;
}

const KEY = Symbol.for('leasehold.test-run');

export function runState(): RunState {
  const holder = globalThis as unknown as Record<symbol, RunState | undefined>;
  return (holder[KEY] ??= {});
}
