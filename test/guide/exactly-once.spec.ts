import { type Handler, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import { Injectable, Module } from '@nestjs/common';
import { Client } from 'pg';
import { DataSource } from 'typeorm';
import { type TestDatabase, createTestDatabase, startLeaseApp } from '../support';
import { untilState } from '../support/job-states';
import { expectPageShowsSpec } from '../support/page-examples';

// #region complete
@JobHandler('points.award', { backoff: '1ms' })
export class AwardPoints implements Handler<{ account: string; points: number }> {
  async handle({ payload }: Job<{ account: string; points: number }>, lease: Lease): Promise<void> {
    await lease.transaction(async (manager) => {
      await manager.query('UPDATE accounts SET points = points + $1 WHERE id = $2', [payload.points, payload.account]);
      await lease.completeIn(manager, { awarded: payload.points });
    });
  }
}
// #endregion

// #region checkpoint
@JobHandler('points.award-all', { backoff: '1ms' })
export class AwardAll implements Handler<{ accounts: string[] }, number, number> {
  async handle({ payload, checkpoint }: Job<{ accounts: string[] }, number>, lease: Lease): Promise<number> {
    let done = checkpoint ?? 0;
    for (const account of payload.accounts.slice(done)) {
      await lease.transaction(async (manager) => {
        await manager.query('UPDATE accounts SET points = points + 1 WHERE id = $1', [account]);
        await lease.checkpointIn(manager, done + 1);
      });
      done++;
    }
    return done;
  }
}
// #endregion

@Injectable()
class Connections {
  url = '';
  async connect(): Promise<Client> {
    const client = new Client({ connectionString: this.url });
    await client.connect();
    return client;
  }
}

// #region pg
@JobHandler('points.reset')
export class ResetPoints implements Handler<{ account: string }> {
  constructor(private readonly connections: Connections) {}

  async handle({ payload }: Job<{ account: string }>, lease: Lease): Promise<void> {
    const client = await this.connections.connect();
    try {
      await lease.transaction(
        async (tx) => {
          await tx.query('UPDATE accounts SET points = 0 WHERE id = $1', [payload.account]);
          await lease.completeIn(tx);
        },
        { client },
      );
    } finally {
      await client.end();
    }
  }
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-exactly-once' });
});
afterAll(() => db.drop());

it('docs/guide/exactly-once.md: with completeIn, with checkpointIn, with pg', async () => {
  await db.query(`CREATE TABLE accounts (id text PRIMARY KEY, points int NOT NULL DEFAULT 0)`);
  await db.query(`INSERT INTO accounts VALUES ('a'), ('b'), ('c')`);
  const dataSource = await new DataSource({ type: 'postgres', url: db.url }).initialize();
  @Module({ providers: [{ provide: DataSource, useValue: dataSource }], exports: [DataSource] })
  class DatabaseModule {}
  const connections = new Connections();
  connections.url = db.url;
  const { jobs } = await startLeaseApp(db, {
    imports: [DatabaseModule],
    handlers: [AwardPoints, AwardAll, ResetPoints, { provide: Connections, useValue: connections }],
  });
  const points = async () =>
    (await db.query<{ points: number }>('SELECT points FROM accounts ORDER BY id')).map((r) => r.points);
  const one = await jobs.enqueue(AwardPoints, { account: 'a', points: 5 });
  expect(await untilState(jobs, one, 'completed')).toMatchObject({ result: { awarded: 5 } });
  const all = await jobs.enqueue(AwardAll, { accounts: ['a', 'b', 'c'] });
  await untilState(jobs, all, 'completed');
  expect(await points()).toEqual([6, 1, 1]);
  await untilState(jobs, await jobs.enqueue(ResetPoints, { account: 'a' }), 'completed');
  expect(await points()).toEqual([0, 1, 1]);
  await dataSource.destroy();
});

it('docs/guide/exactly-once.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/exactly-once.md', 'test/guide/exactly-once.spec.ts'));
