import {
  type Handler,
  type Job,
  JobHandler,
  type JobStatus,
  type Lease,
  LeaseEvents,
  NonRetryableError,
} from '@leasehold/nestjs';
import { Injectable } from '@nestjs/common';
import { type TestDatabase, createTestDatabase, eventually, startLeaseApp } from '../support';
import { untilState } from '../support/job-states';
import { expectPageShowsSpec } from '../support/page-examples';

class PaymentError extends Error {
  constructor(
    message: string,
    readonly declined = false,
    readonly retryAfterMs?: number,
  ) {
    super(message);
  }
}

@Injectable()
class Payments {
  answers: (PaymentError | 'settling' | 'paid')[] = [];
  charge(): Promise<string> {
    const answer = this.answers.shift() ?? 'paid';
    return answer instanceof PaymentError ? Promise.reject(answer) : Promise.resolve(answer);
  }
}

@Injectable()
class Alerts {
  readonly sent: string[] = [];
  send(text: string): void {
    this.sent.push(text);
  }
}

// #region handler
@JobHandler('payment.charge', {
  maxAttempts: 5,
  backoff: (attempt, error) => (error instanceof PaymentError ? error.retryAfterMs : `${attempt * 10}s`),
})
export class ChargePayment implements Handler<{ order: string }, string> {
  constructor(
    private readonly payments: Payments,
    private readonly alerts: Alerts,
  ) {}

  async handle(_job: Job<{ order: string }>, lease: Lease): Promise<string> {
    const answer = await this.payments.charge().catch((error: PaymentError) => {
      if (error.declined) throw new NonRetryableError('the card was declined', { cause: error });
      throw error; // Again after the backoff.
    });
    if (answer === 'settling') lease.snooze('50ms'); // Ask again later; no attempt is spent.
    return answer;
  }

  onFailed(job: JobStatus<{ order: string }>): void {
    this.alerts.send(`Order ${job.payload.order} was not paid: ${job.reason}`);
  }
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-failing' });
});
afterAll(() => db.drop());

it('docs/guide/failing-and-retrying.md: retry, snooze, fail for good', async () => {
  const { app, jobs } = await startLeaseApp(db, { handlers: [ChargePayment, Payments, Alerts] });
  app.get(Payments).answers = [new PaymentError('busy', false, 1), 'settling', 'paid'];
  const paid = await untilState(jobs, await jobs.enqueue(ChargePayment, { order: 'A' }), 'completed');
  expect(paid).toMatchObject({ attempt: 2, snoozes: 1, runs: [{ outcome: 'failed' }, { outcome: 'snoozed' }] });

  const failures: string[] = [];
  // #region event
  app.get(LeaseEvents).on('job.finally-failed', ({ kind, jobId, reason }) => {
    failures.push(`${kind} ${jobId}: ${reason}`);
  });
  // #endregion
  app.get(Payments).answers = [new PaymentError('no', true)];
  const id = await jobs.enqueue(ChargePayment, { order: 'B' });
  await untilState(jobs, id, 'failed');
  await eventually(() => app.get(Alerts).sent.length === 1);
  expect(app.get(Alerts).sent).toEqual(['Order B was not paid: the card was declined']);
  expect(failures).toEqual([`payment.charge ${id}: the card was declined`]);

  // #region retry
  await jobs.retry(id); // Fresh budgets, and from its last checkpoint.
  // #endregion
  await untilState(jobs, id, 'completed');
});

it('docs/guide/failing-and-retrying.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/failing-and-retrying.md', 'test/guide/failing.spec.ts'));
