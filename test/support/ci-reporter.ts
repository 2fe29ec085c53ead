import { writeSync } from 'node:fs';
import { runState } from './run-state';

/** The counts that this reporter reads of jest's results. */
interface Results {
  numPassedTests: number;
  numFailedTests: number;
  numPendingTests: number;
  numTodoTests: number;
  /** Files that could not even be loaded. */
  numRuntimeErrorTestSuites: number;
}

/**
 * With `LEASE_CI_SUMMARY=1` the last line of the output is `N passed, N failed`. It is written when the process exits:
 * the global teardown runs after the reporters, and may fail too.
 */
export default class CiReporter {
  private results: Results | undefined;

  constructor() {
    if (process.env.LEASE_CI_SUMMARY === '1') process.once('exit', () => writeSync(1, `${this.summary()}\n`));
  }

  onRunComplete(_contexts: unknown, results: Results): void {
    this.results = results;
  }

  private summary(): string {
    if (this.results === undefined) return '0 passed, 1 failed';
    const { numPassedTests, numFailedTests, numRuntimeErrorTestSuites, numPendingTests, numTodoTests } = this.results;
    const failed = numFailedTests + numRuntimeErrorTestSuites + (runState().teardownFailed === true ? 1 : 0);
    const skipped = numPendingTests + numTodoTests;
    return `${numPassedTests} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`;
  }
}
