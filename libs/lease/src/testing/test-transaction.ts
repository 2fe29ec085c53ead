import type { Client, ClientBase, QueryResultRow } from 'pg';
import type { EntityManager, QueryRunner } from 'typeorm';
import { type TransactionTarget, runnerOn } from '../storage/caller-transaction';
import { limitedQuery, ownTypes } from '../storage/connection';
import { TestTransactionError } from './errors';

type Run = <R extends QueryResultRow>(text: string, values?: unknown[]) => Promise<R[]>;

/** In a failed transaction; outside one, for SAVEPOINT. */
const UNUSABLE = ['25P02', '25P01'];

/**
 * A test's own transaction, through which all statements go one after the other. Each has a savepoint, so that one that the database refuses does
 * not end the transaction. The connection's settings and the parsers of its results stay the user's.
 */
export class TestTransaction {
  private last: Promise<unknown> = Promise.resolve();
  private savepoints = 0;

  private constructor(
    readonly client: ClientBase,
    /** TypeORM's, if it came as one. */
    readonly manager: EntityManager | undefined,
    /** False: it is over. As far as its client can tell. */
    readonly isOpen: () => boolean,
    /** Of one statement, in ms. */
    private readonly limitMs: number,
    /** Told when it turns out that nothing can be written any more. */
    private readonly onUnusable: (error: Error) => void,
  ) {}

  /** @throws InvalidJobError when it is no transaction, or none is open */
  static async of(
    target: TransactionTarget,
    limitMs: number,
    onUnusable: (error: Error) => void,
  ): Promise<TestTransaction> {
    runnerOn(target);
    const runner = queryRunnerOf(target);
    if (!runner) {
      const client = target as ClientBase;
      const isOpen = (): boolean => client.getTransactionStatus?.() !== 'I';
      return new TestTransaction(client, undefined, isOpen, limitMs, onUnusable);
    }
    const client = (await runner.connect()) as ClientBase;
    return new TestTransaction(client, runner.manager, () => runner.isTransactionActive, limitMs, onUnusable);
  }

  /** One statement. */
  run<R extends QueryResultRow>(text: string, values: unknown[], timeoutMs = this.limitMs): Promise<R[]> {
    return this.inTurn(async () => {
      const name = this.nextName();
      const run = this.runner(timeoutMs);
      return this.guarded(name, run, async () => {
        const answered = run<R>(text, values);
        // Sent right behind it, so that no savepoint of the user's comes between the two, to be released with ours.
        const released = run(`RELEASE SAVEPOINT ${name}`);
        const [rows] = await Promise.allSettled([answered, released]);
        if (rows.status === 'rejected') throw rows.reason;
        return rows.value;
      });
    });
  }

  /** Several statements, all or none, with none of ours between them. */
  together<T>(work: (run: Run) => Promise<T>, timeoutMs = this.limitMs): Promise<T> {
    return this.inTurn(() => {
      const name = this.nextName();
      const run = this.runner(timeoutMs);
      return this.guarded(name, run, async () => {
        const result = await work(run);
        await run(`RELEASE SAVEPOINT ${name}`);
        return result;
      });
    });
  }

  /** The user's work: what it does is there only if it ends well. Statements of ours may come between. */
  async nested<T>(work: () => Promise<T>): Promise<T> {
    const name = this.nextName();
    const run = this.runner(this.limitMs);
    await this.inTurn(() => run(`SAVEPOINT ${name}`));
    try {
      const result = await work();
      await this.inTurn(() => run(`RELEASE SAVEPOINT ${name}`));
      return result;
    } catch (error) {
      await this.inTurn(() => run(`ROLLBACK TO SAVEPOINT ${name}`)).catch(() => undefined);
      throw error;
    }
  }

  /** Resolves when nothing of ours is on its way. */
  async idle(): Promise<void> {
    await this.last;
  }

  private inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = this.last.then(() => {
      if (!this.isOpen()) throw this.unusable(undefined);
      return work();
    });
    this.last = done.catch(() => undefined);
    return done;
  }

  private async guarded<T>(name: string, run: Run, work: () => Promise<T>): Promise<T> {
    try {
      await run(`SAVEPOINT ${name}`);
    } catch (error) {
      throw this.unusable(error as Error & { code?: string });
    }
    try {
      return await work();
    } catch (error) {
      await run(`ROLLBACK TO SAVEPOINT ${name}`).catch((reason: Error) => this.onUnusable(reason));
      throw error;
    }
  }

  private runner(timeoutMs: number): Run {
    return (text, values = []) => limitedQuery(this.client as Client, { text, values, types: ownTypes }, timeoutMs);
  }

  private nextName(): string {
    return `leasehold_test_${++this.savepoints}`;
  }

  private unusable(cause: (Error & { code?: string }) | undefined): Error {
    if (cause && !UNUSABLE.includes(cause.code ?? '')) return cause;
    const error = new TestTransactionError(
      cause?.code === '25P02'
        ? 'The transaction given to useTransaction has failed: a statement of the test, not of Leasehold, was refused in it, and PostgreSQL takes none after that until the rollback'
        : 'The transaction given to useTransaction is over: call the function that useTransaction returned before it is committed or rolled back',
      cause ? { cause } : undefined,
    );
    this.onUnusable(error);
    return error;
  }
}

function queryRunnerOf(target: TransactionTarget): QueryRunner | undefined {
  if ('isTransactionActive' in target) return target;
  return 'getRepository' in target ? target.queryRunner : undefined;
}
