import type { ClientBase, QueryResultRow } from 'pg';
import type { EntityManager, QueryRunner } from 'typeorm';
import { InvalidJobError } from '../errors';

/** What a caller's transaction runs on: TypeORM's manager or query runner, or a `pg` client. */
export type TransactionTarget = EntityManager | QueryRunner | ClientBase;

/** The caller's own transaction: what is done there is visible at its commit and gone at its rollback. At most one of these. */
export interface CallerTransaction {
  /** The manager that TypeORM hands to `dataSource.transaction(…)`. */
  manager?: EntityManager;
  /** A TypeORM query runner with an open transaction. */
  queryRunner?: QueryRunner;
  /** A `pg` client with an open transaction. */
  client?: ClientBase;
}

export const TRANSACTION_KEYS = ['manager', 'queryRunner', 'client'] as const;

export type RunInTransaction = <R extends QueryResultRow = QueryResultRow>(
  text: string,
  values: unknown[],
) => Promise<R[]>;

export const isTransactional = ({ manager, queryRunner, client }: CallerTransaction): boolean =>
  manager !== undefined || queryRunner !== undefined || client !== undefined;

/** @throws InvalidJobError when it is several, or has no open transaction */
export function runnerOf({ manager, queryRunner, client }: CallerTransaction): RunInTransaction {
  if ([manager, queryRunner, client].filter(Boolean).length > 1) {
    throw new InvalidJobError("Give one of 'manager', 'queryRunner' and 'client', not several", 'manager');
  }
  if (client) {
    assertOpen(client);
    return async <R extends QueryResultRow>(text: string, values: unknown[]) =>
      (await client.query(text, values)).rows as R[];
  }
  const runner = queryRunner ?? manager?.queryRunner;
  if (!runner?.isTransactionActive) {
    const field = queryRunner ? 'queryRunner' : 'manager';
    throw new InvalidJobError(
      `${field} has no open transaction: pass the manager that dataSource.transaction() hands to its callback, or leave '${field}' out`,
      field,
    );
  }
  return async <R extends QueryResultRow>(text: string, values: unknown[]) => (await runner.query(text, values)) as R[];
}

/** Tells the three apart. */
export function runnerOn(target: TransactionTarget): RunInTransaction {
  if (typeof target !== 'object' || target === null) {
    throw new InvalidJobError(`a manager, a query runner or a pg client is needed, not ${String(target)}`, 'manager');
  }
  if ('isTransactionActive' in target) return runnerOf({ queryRunner: target });
  if ('getRepository' in target) return runnerOf({ manager: target });
  return runnerOf({ client: target });
}

/** A pool runs each statement on another connection; a client of a recent pg knows whether a transaction is open. */
function assertOpen(client: ClientBase): void {
  if ('totalCount' in client) {
    throw new InvalidJobError('client is a pool: pass the client of pool.connect() that has the transaction', 'client');
  }
  if (client.getTransactionStatus?.() === 'I') {
    throw new InvalidJobError(
      "client has no open transaction: send BEGIN and wait for it, or leave 'client' out",
      'client',
    );
  }
}
