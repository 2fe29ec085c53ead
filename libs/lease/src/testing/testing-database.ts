import type { QueryResultRow } from 'pg';
import type { TransactionTarget } from '../storage/caller-transaction';
import { Database, type QueryOptions } from '../storage/database';
import { TestTransactionError } from './errors';
import { TestClock } from './test-clock';
import { TestTransaction } from './test-transaction';

type Run = <R extends QueryResultRow>(text: string, values?: unknown[]) => Promise<R[]>;

/**
 * The database of an application under test: its statements take the time from the test's clock and, while the test says so, go through the test's
 * own transaction.
 */
export class TestingDatabase extends Database {
  clock: TestClock;
  /** The test's transaction, while there is one. */
  test: TestTransaction | undefined;
  private limitMs: number;
  private installed: Promise<void> | undefined;
  private farewells: (() => Promise<void>)[];

  /**
   * Makes the application's database one of these. Not provided in its place: an application that is tested as it is has its own already, and every
   * service has hold of that one.
   */
  static adopt(database: Database, limitMs: number): TestingDatabase {
    if (database instanceof TestingDatabase) return database;
    const adopted = Object.setPrototypeOf(database, TestingDatabase.prototype) as TestingDatabase;
    adopted.clock = new TestClock(database.schema);
    adopted.limitMs = limitMs;
    adopted.farewells = [];
    return adopted;
  }

  protected override async openOnce(): Promise<void> {
    await super.openOnce();
    await this.install();
  }

  /** Also for a database that was open before it was adopted. */
  async install(): Promise<void> {
    this.installed ??= this.clock
      .install((work) => super.transaction(work))
      .catch((error: unknown) => {
        this.installed = undefined;
        throw error;
      });
    await this.installed;
  }

  /** Calls back before the connections are closed. */
  beforeClose(farewell: () => Promise<void>): void {
    this.farewells.push(farewell);
  }

  /**
   * Sends everything through this transaction, until the function is called that this returns.
   * @param onUnusable told, once, when it turns out that nothing can be written there any more
   */
  async enter(target: TransactionTarget, onUnusable: (error: Error) => void): Promise<() => Promise<void>> {
    if (this.test) {
      throw new TestTransactionError(
        'useTransaction is in force already: call the function that it returned, then use another transaction',
      );
    }
    let told = false;
    const test = await TestTransaction.of(target, this.limitMs, (error) => {
      if (!told) onUnusable(error);
      told = true;
    });
    this.test = test;
    return async () => {
      if (this.test === test) this.test = undefined;
      await test.idle();
    };
  }

  /** One statement on the pool, whatever transaction is in force. */
  outside<R extends QueryResultRow>(text: string, values: unknown[] = []): Promise<R[]> {
    return super.transaction((run) => run<R>(text, values));
  }

  protected override unchecked<R extends QueryResultRow>(
    text: string,
    values: unknown[] = [],
    options: QueryOptions = {},
  ): Promise<R[]> {
    const ours = this.clock.qualify(text);
    // What would be announced right behind it is not committed yet.
    return this.test ? this.test.run<R>(ours, values, options.timeoutMs) : super.unchecked<R>(ours, values, options);
  }

  override transaction<T>(work: (run: Run) => Promise<T>, timeoutMs = this.limitMs): Promise<T> {
    const qualified =
      (run: Run): Run =>
      (text, values) =>
        run(this.clock.qualify(text), values);
    return this.test
      ? this.test.together((run) => work(qualified(run)), timeoutMs)
      : super.transaction((run) => work(qualified(run)), timeoutMs);
  }

  override async close(): Promise<void> {
    for (const farewell of this.farewells.splice(0)) await farewell();
    await super.close();
  }
}
