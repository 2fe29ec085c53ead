import type { HandlerClass } from '../handlers/handler.types';
import type { JobTarget } from '../jobs/job-enqueue';
import type { BatchHook, BatchMember, BatchOptions, CreatedBatch, DependsOn, PayloadsOf } from './batch.types';

type Create = (name: string, members: BatchMember[], options: BatchOptions) => Promise<CreatedBatch>;
type More = Omit<BatchMember, 'handler' | 'payload' | 'name'>;

/**
 * Puts a batch together of the usual shapes; every shape returns the names that it gave, for others to depend on. Nothing is written before `create`.
 *
 * Map and reduce: `fanOut` the parts, and let `closing` run over `batches.results(payload.batch.id)`: the closing job hangs on the batch, not on each part.
 */
export class BatchBuilder {
  private readonly members: BatchMember[] = [];
  private readonly hooks: Pick<BatchOptions, 'onCompleted' | 'onFailed' | 'onFinished'> = {};

  constructor(
    private readonly name: string,
    private readonly send: Create,
  ) {}

  /** One member of this name. */
  job<T extends JobTarget>(name: string, handler: T, payload: PayloadsOf<T>[number], more: More = {}): string {
    this.members.push({ ...more, handler, payload, name });
    return name;
  }

  /** One member for each payload, side by side: `name[0]`, `name[1]`, … */
  fanOut<T extends JobTarget>(name: string, handler: T, payloads: PayloadsOf<T>, more: More = {}): string[] {
    return payloads.map((payload, i) => this.job(`${name}[${i}]`, handler, payload as never, more));
  }

  /** One after the other, each when the one before has completed: `name[0]`, … @returns the last one's name */
  chain(name: string, steps: readonly (readonly [handler: JobTarget, payload: unknown])[], more: More = {}): string {
    let after: readonly DependsOn[] = more.dependsOn ?? [];
    let last = '';
    for (const [i, [handler, payload]] of steps.entries()) {
      last = this.job(`${name}[${i}]`, handler, payload, { ...more, dependsOn: after });
      after = [last];
    }
    return last;
  }

  /** A job that runs once when the batch has ended (`on`: only if it has completed, or failed), with `payload.batch` to say how. */
  closing(hook: BatchHook | HandlerClass, on: 'completed' | 'failed' | 'finished' = 'completed'): this {
    const field = on === 'completed' ? 'onCompleted' : on === 'failed' ? 'onFailed' : 'onFinished';
    this.hooks[field] = hook;
    return this;
  }

  /** See `BatchesService.create`. */
  create(options: BatchOptions = {}): Promise<CreatedBatch> {
    return this.send(this.name, this.members, { ...this.hooks, ...options });
  }
}
