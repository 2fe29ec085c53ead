import { Injectable, type Type } from '@nestjs/common';
import { ContextIdFactory, DiscoveryService, ModuleRef } from '@nestjs/core';
import type { InstanceWrapper } from '@nestjs/core/injector/instance-wrapper';
import { LeaseSetupError } from '../errors';
import { type ResolvedBudget, ResolvedOptions } from '../options/lease-options';
import { resolveBudget, validateHandlerOptions } from '../options/resolve-options';
import { didYouMean } from '../options/suggest';
import { isName } from '../options/validators';
import type { CheckpointFormat, Handler, HandlerClass } from './handler.types';
import { handlerMetadata, handlerTypeOf } from './job-handler.decorator';

/** A kind that this application knows: how its jobs are enqueued and, if its class is provided, run. */
export interface HandlerDefinition {
  kind: string;
  type: Type<Handler>;
  queue: string;
  concurrency: number;
  priority: number;
  fleetConcurrency: number | undefined;
  concurrencyPerKey: number;
  concurrencyKey: ((payload: never) => string | undefined) | undefined;
  chargeLost: boolean;
  checkpoint: CheckpointFormat;
  budget: ResolvedBudget;
  /** Whether a deadline was set for the kind itself; else a queue's own outranks the module's. */
  ownDeadline: boolean;
  payload: Type<object> | undefined;
  /** The instance for all jobs, unless each has one of its own. */
  readonly singleton: Handler | undefined;
  /** The instance for one job: the singleton, or one resolved for this job alone. */
  instance(): Promise<Handler>;
}

/** Finds the handlers of this lease instance in the application (Nest's discovery) and refuses what could not work. */
@Injectable()
export class HandlerRegistry {
  private readonly byKind = new Map<string, HandlerDefinition>();
  private readonly byType = new Map<unknown, HandlerDefinition>();
  private explored = false;

  constructor(
    private readonly discovery: DiscoveryService,
    private readonly moduleRef: ModuleRef,
    private readonly options: ResolvedOptions,
  ) {}

  get kinds(): string[] {
    this.explore();
    return [...this.byKind.keys()];
  }

  get(kind: string): HandlerDefinition | undefined {
    this.explore();
    return this.byKind.get(kind);
  }

  /** The definition behind a class, even one that this application enqueues for but does not provide. */
  of(target: HandlerClass): HandlerDefinition | undefined {
    this.explore();
    const known = this.byType.get(target);
    if (known) return known;
    const definition = this.define(target as Type<Handler>, undefined);
    if (definition) this.byType.set(target, definition);
    return definition;
  }

  /** Reads all providers, once. @throws LeaseSetupError for two handlers of a kind, a class without `handle`, a bad option */
  explore(): void {
    if (this.explored) return;
    this.explored = true;
    for (const wrapper of this.discovery.getProviders()) {
      const type = handlerTypeOf(wrapper);
      if (!type || this.byType.has(type)) continue;
      const definition = this.define(type, wrapper);
      if (!definition) continue;
      const other = this.byKind.get(definition.kind);
      if (other) {
        throw new LeaseSetupError(
          `Kind '${definition.kind}' has two handlers: ${other.type.name} and ${type.name}. One class handles a kind; give one of them another kind`,
        );
      }
      this.byKind.set(definition.kind, definition);
      this.byType.set(type, definition);
    }
    // A producer may share its configuration with workers, and enqueue for classes that it does not provide.
    const configured = this.options.role === 'producer' ? [] : Object.keys(this.options.handlers);
    for (const kind of configured) {
      if (!this.byKind.has(kind)) {
        throw new LeaseSetupError(
          `Option handlers['${kind}']: no handler of this kind is provided${didYouMean(kind, this.byKind.keys())}`,
        );
      }
    }
  }

  private define(type: Type<Handler>, wrapper: InstanceWrapper | undefined): HandlerDefinition | undefined {
    const metadata = handlerMetadata(type);
    const {
      payload,
      instance = 'default',
      concurrencyKey,
      checkpoint = { version: 1 },
      ...decorated
    } = metadata?.options ?? {};
    if (!metadata || instance !== this.options.name) return undefined;
    const { kind } = metadata;
    const where = `@JobHandler(${JSON.stringify(kind)}) on ${type.name}`;
    if (!isName(kind))
      throw new LeaseSetupError(`${where}: the kind must be text of 1 to 200 bytes without NUL or lone surrogates`);
    if (typeof (type.prototype as Partial<Handler>).handle !== 'function') {
      throw new LeaseSetupError(`${where}: the class has no method handle(job, lease)`);
    }
    if (concurrencyKey !== undefined && typeof concurrencyKey !== 'function') {
      throw new LeaseSetupError(`${where}: concurrencyKey must be a function of the payload that returns text`);
    }
    if (!Number.isInteger(checkpoint.version) || checkpoint.version < 1 || checkpoint.version > 2_147_483_647) {
      throw new LeaseSetupError(`${where}: checkpoint.version must be a whole number from 1`);
    }
    let singleton: Handler | undefined;
    const own = { ...validateHandlerOptions(decorated, where), ...this.options.handlers[kind] };
    return {
      kind,
      type,
      queue: own.queue ?? 'default',
      concurrency: own.concurrency ?? 10,
      priority: own.priority ?? 0,
      fleetConcurrency: own.fleetConcurrency,
      concurrencyPerKey: own.concurrencyPerKey ?? 1,
      concurrencyKey,
      chargeLost: own.onLost === 'charge',
      checkpoint,
      budget: resolveBudget(own, where, this.options.budget, true),
      ownDeadline: own.deadline !== undefined,
      payload,
      get singleton() {
        return (singleton ??= singletonOf(wrapper));
      },
      instance: () => this.instanceOf(type, wrapper),
    };
  }

  /**
   * A request-scoped or transient handler, or one with such a dependency anywhere below, is made anew for each job in a context of its
   * own, never left with half its dependencies undefined (F:J8).
   */
  private async instanceOf(type: Type<Handler>, wrapper: InstanceWrapper | undefined): Promise<Handler> {
    if (!wrapper) throw new LeaseSetupError(`${type.name} is not a provider of this application`);
    const singleton = singletonOf(wrapper);
    if (singleton) return singleton;
    const contextId = ContextIdFactory.create();
    return this.moduleRef.resolve<Handler>(wrapper.token, contextId, { strict: false });
  }
}

/** Looked up when the first job comes: at discovery an instance may not be there yet. */
const singletonOf = (wrapper: InstanceWrapper | undefined): Handler | undefined =>
  wrapper?.isDependencyTreeStatic() && !wrapper.isTransient ? (wrapper.instance as Handler) : undefined;
